"""Decoding on a GPU: a step is captured as a CUDA graph and replayed several times before the host reads the tokens.

All state of a step is in buffers on the GPU: the tokens to feed, their positions, the blocks of each sequence, the
uniform numbers, the sampled tokens. So a run of several steps (`DecodeRun`) can be launched before the previous run is
read, and the GPU does not wait for the host. A graph is captured for each batch size (rounded up); rows without a
sequence write to the cache's scratch block. The decoder layers are compiled once for all layers and sizes, with fused
projections (`FusedLayers`); attention is a Triton kernel (`kernels.py`).

Shapes: B rows of the batch, N blocks of a sequence, T steps of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from covey.models.families import FUSED_ATTENTION, FUSED_MLP
from covey.rollout.embedded import attention
from covey.rollout.embedded.cache import KvCache
from covey.rollout.embedded.gpu_batch import STEPS
from covey.rollout.embedded.kernels import draw_and_advance, fused_attention, paged_attention, splits_for
from covey.rollout.embedded.scheduler import RequestState
from covey.streams import uniform


@dataclass(frozen=True)
class DecodeRun:
    """Several steps launched at once, and the host buffers that will hold their tokens. None: an empty row."""

    rows: tuple[RequestState | None, ...]
    steps: int
    ids_BT: Tensor
    logprobs_BT: Tensor
    finished: torch.cuda.Event | None  # None without a GPU

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        if self.finished is not None:
            self.finished.synchronize()
        return self.ids_BT.tolist(), self.logprobs_BT.tolist()


class GraphStep:
    """Attention of a captured step, over fixed buffers."""

    def __init__(self, cache: KvCache, table_BN: Tensor, position_B: Tensor, splits: int) -> None:
        assert cache.keys is not None and cache.values is not None
        self.keys, self.values = cache.keys, cache.values
        self.table_BN = table_BN
        self.position_B = position_B
        self.splits = splits

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        out: Tensor = paged_attention(
            q, k, v, self.keys, self.values, layer, self.table_BN, self.position_B, scale, window or 0, self.splits
        )
        return out


class GraphDecoder:
    def __init__(self, model: Any, cache: KvCache, *, rows: int, blocks: int, compiled: bool) -> None:
        device = model.get_input_embeddings().weight.device
        self.model = model
        self.cache = cache
        self.compiled = compiled
        self.ids_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.position_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.step_B = torch.zeros(rows, dtype=torch.int32, device=device)
        self.table_BN = torch.full((rows, blocks), cache.scratch, dtype=torch.int32, device=device)
        self.temperature_B = torch.ones(rows, dtype=torch.float32, device=device)
        self.uniform_BT = torch.zeros(rows, STEPS, dtype=torch.float32, device=device)
        self.out_ids_BT = torch.zeros(rows, STEPS, dtype=torch.int64, device=device)
        self.out_logprobs_BT = torch.zeros(rows, STEPS, dtype=torch.float32, device=device)
        self.graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool: Any = None
        self.loaded: list[tuple[RequestState, int] | None] = []  # requests in the buffers, their block counts
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.layers = list(attention.backbone(model).layers)
        self.fused = FusedLayers(self.layers)

    def launch(self, rows: Sequence[RequestState | None], steps: int, ahead: int = 0) -> DecodeRun:
        """Launch the next `steps` tokens of every sequence. `ahead`: steps of a run of the same rows not read yet."""
        graph, _ = self._graph(self._size(len(rows)), draws=True)
        self._load(rows, ahead)
        numbers = [[uniform(r.sampling.seed, len(r.ids) + ahead + t) if r else 0.0 for t in range(steps)] for r in rows]
        self._send(self.uniform_BT[: len(rows), :steps], numbers)
        self.step_B.zero_()
        for _ in range(steps):
            graph.replay()
        host_ids, host_logprobs = (
            self._fetch(out[: len(rows), :steps]) for out in (self.out_ids_BT, self.out_logprobs_BT)
        )
        finished = torch.cuda.Event() if self.ids_B.is_cuda else None
        if finished is not None:
            finished.record()
        return DecodeRun(tuple(rows), steps, host_ids, host_logprobs, finished)

    def logits(self, rows: Sequence[RequestState]) -> Tensor:
        """Logits of the next token, for sampling outside of the graph."""
        graph, logits_BV = self._graph(self._size(len(rows)), draws=False)
        self._load(rows, 0)
        self.loaded = []
        graph.replay()
        return logits_BV[: len(rows)]

    def _size(self, rows: int) -> int:
        """The batch size that is captured for `rows` rows: powers of two, from 8 on also 1.5 times these."""
        size = 1
        while size < rows:
            size = (
                size * 3 // 2
                if size & (size - 1) == 0 and size >= 8 and size * 3 // 2 >= rows
                else 1 << size.bit_length()
            )
        return min(size, len(self.ids_B))

    def _load(self, rows: Sequence[RequestState | None], ahead: int) -> None:
        """Fill the buffers. Rows that have not moved have their next token and position there already."""
        size, width, scratch = self._size(len(rows)), self.table_BN.shape[1], self.cache.scratch
        spare: list[None] = [None] * (size - len(rows))
        entries = [None if row is None else (row, len(row.blocks)) for row in rows]
        loaded_rows = [None if entry is None else entry[0] for entry in self.loaded]
        same_rows = len(loaded_rows) == len(rows) and all(
            row is None or row is old for row, old in zip(rows, loaded_rows, strict=True)
        )
        assert same_rows or not ahead, "a run in progress has only the rows it was launched with"
        if entries != self.loaded:
            blocks = [[] if row is None else row.blocks for row in (*rows, *spare)]
            self._send(self.table_BN[:size], [b + [scratch] * (width - len(b)) for b in blocks])
        if not same_rows:
            padded = (*rows, *spare)
            self._send(self.ids_B[:size], [0 if row is None else row.next_token for row in padded])
            self._send(self.position_B[:size], [0 if row is None else row.cached for row in padded])
            self._send(self.temperature_B[:size], [row.sampling.temperature if row else 0.0 for row in padded])
        elif empty := [n for n, row in enumerate((*rows, *spare)) if row is None]:
            # Their positions advance like the others: reset them before they exceed the table.
            at = torch.empty(len(empty), dtype=torch.int64, device=self.position_B.device)
            self._send(at, empty)
            self.position_B.index_fill_(0, at, 0)
        self.loaded = entries

    def _send(self, target: Tensor, values: Any) -> None:
        """Copy to the GPU asynchronously."""
        source = torch.tensor(values, dtype=target.dtype)
        target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)

    def _fetch(self, source: Tensor) -> Tensor:
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        return host.copy_(source, non_blocking=True)

    def _forward(self, size: int) -> Tensor:
        out = self.model(input_ids=self.ids_B[:size, None], position_ids=self.position_B[:size, None], use_cache=False)
        logits: Tensor = out.logits[:, -1]
        return logits

    def _step(self, size: int, draws: bool) -> Tensor:
        logits_BV = self._forward(size)
        if draws:
            draw_and_advance(
                logits_BV,
                self.temperature_B[:size],
                self.uniform_BT[:size],
                self.ids_B[:size],
                self.position_B[:size],
                self.step_B[:size],
                self.out_ids_BT[:size],
                self.out_logprobs_BT[:size],
            )
        return logits_BV

    def _graph(self, size: int, draws: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        if (size, draws) not in self.graphs:
            self.graphs[size, draws] = self._capture(size, draws)
        return self.graphs[size, draws]

    def _capture(self, size: int, draws: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Warm up on the scratch block first, so that kernels are compiled and no cached tokens are overwritten."""
        kept = [buffer.clone() for buffer in self._buffers()]
        self.table_BN.fill_(self.cache.scratch)
        self.position_B.zero_()
        assert self.cache.keys is not None
        heads = self.cache.keys.shape[2]
        step = GraphStep(
            self.cache, self.table_BN[:size], self.position_B[:size], splits_for(size, heads, self.processors)
        )
        graph = torch.cuda.CUDAGraph()
        with (
            attention.engine_attention(self.model, step),
            self.fused.active(),
            layers_compiled(self.layers if self.compiled else ()),
        ):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._step(size, draws)
                    self.step_B.zero_()
            torch.cuda.current_stream().wait_stream(stream)
            # Other threads may allocate and copy meanwhile, e.g. to save a checkpoint.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                logits_BV = self._step(size, draws)
        self.pool = self.pool or graph.pool()
        for buffer, before in zip(self._buffers(), kept, strict=True):
            buffer.copy_(before)
        return graph, logits_BV

    def _buffers(self) -> tuple[Tensor, ...]:
        return self.ids_B, self.position_B, self.step_B, self.table_BN


class layers_compiled:
    """Run the decoder layers compiled in this context, all with the same code."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = layers

    def __enter__(self) -> None:
        if not self.layers:
            return
        torch._dynamo.config.allow_unspec_int_on_nn_module = True
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward)

    def __exit__(self, *error: object) -> None:
        for layer in self.layers:
            del layer.forward


# -- Fused layers ------------------------------------------------------------------------------------------------------


class FusedLayers:
    """Decoder layers with fewer and larger kernels: one product for queries, keys and values, one for gate and up, and
    rotary embedding inside the attention kernel.

    The weights stay the learner's own parameters. Those that are fused are moved next to each other in memory, each
    parameter a view of its part, so an update of the parameter updates the fused weight. Layers with adapters, and
    layers that are not built like Llama's, run unchanged."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.patches: list[tuple[Any, Any]] = []
        for layer in layers:
            attend, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
            if type(attend).__name__ in FUSED_ATTENTION and _fuse_attention(attend):
                self.patches.append((attend, MethodType(_attention, attend)))
            if type(mlp).__name__ in FUSED_MLP and _fuse_mlp(mlp):
                self.patches.append((mlp, MethodType(_mlp, mlp)))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the fused layers in this context. They compute one new token of each sequence."""
        for module, forward in self.patches:
            module.forward = forward
        try:
            yield
        finally:
            for module, _ in self.patches:
                del module.forward


def _attention(self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any) -> Any:
    step = attention.current_step()
    qkv = linear(hidden_states[:, 0], self.fused_weight, self.fused_bias)
    cos, sin = (x[:, 0] for x in position_embeddings)
    out = fused_attention(
        qkv, cos, sin, self.fused_norms, step.keys, step.values, self.layer_idx, step.table_BN, step.position_B,
        self.scaling, self.fused_window, step.splits, self.fused_eps,
    )  # fmt: skip
    return self.o_proj(out.flatten(2)), None


def _mlp(self: Any, x: Tensor) -> Any:
    gate, up = linear(x, self.fused_weight, self.fused_bias).chunk(2, -1)
    return self.down_proj(self.act_fn(gate) * up)


def _fuse_attention(module: Any) -> bool:
    linears = (module.q_proj, module.k_proj, module.v_proj)
    if not _are_plain(linears):
        return False
    norms = (module.q_norm, module.k_norm) if hasattr(module, "q_norm") else None
    module.fused_weight = stacked_views([x.weight for x in linears])
    module.fused_bias = _biases(linears)
    module.fused_norms = None if norms is None else stacked_views([x.weight for x in norms]).view(2, -1)
    module.fused_eps = 0.0 if norms is None else norms[0].variance_epsilon
    own = type(module).__name__ != "MistralAttention"
    window = getattr(module, "sliding_window", None) if own else getattr(module.config, "sliding_window", None)
    module.fused_window = window or 0
    return True


def _fuse_mlp(module: Any) -> bool:
    linears = (module.gate_proj, module.up_proj)
    if not _are_plain(linears):
        return False
    module.fused_weight = stacked_views([x.weight for x in linears])
    module.fused_bias = _biases(linears)
    return True


def _are_plain(linears: Sequence[Any]) -> bool:
    return all(type(x) is nn.Linear for x in linears) and len({x.bias is None for x in linears}) == 1


def _biases(linears: Sequence[Any]) -> Tensor | None:
    return None if linears[0].bias is None else stacked_views([x.bias for x in linears])


@torch.no_grad()
def stacked_views(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor of the stacked parameters, each of which becomes a view of its rows. Parameters that are adjacent in
    memory already are not moved."""
    starts = [p.data_ptr() for p in parameters]
    ends = [start + p.numel() * p.element_size() for start, p in zip(starts, parameters, strict=True)]
    first, count = parameters[0], sum(len(p) for p in parameters)
    one_storage = len({p.untyped_storage().data_ptr() for p in parameters}) == 1
    if one_storage and starts[1:] == ends[:-1]:
        return first.data.as_strided((count, *first.shape[1:]), first.stride())
    whole = torch.cat([p.data for p in parameters])
    for p, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        p.data = part
    return whole
