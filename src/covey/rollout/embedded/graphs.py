"""Decoding on a GPU: one step is captured as a CUDA graph and replayed; the host looks at the tokens only now and then.

Everything a step changes lies in buffers on the GPU: the tokens to feed, their positions, the blocks of each sequence,
the uniform numbers, what was drawn. So the next steps can be sent off before the tokens of the last are read (a
`Flight`), and the GPU does not wait for the host. A graph is captured for each size of the batch (rounded up); rows
without a sequence write to the cache's scratch block. The decoder layers are compiled once for all layers and sizes,
with their products joined (`joined.py`); attention is a kernel (`kernels.py`).

Shapes: B rows of the batch, N blocks of a sequence, T steps between two looks.
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
from covey.rollout.embedded.kernels import draw_and_advance, joined_attention, paged_attention, splits_for
from covey.rollout.embedded.scheduler import Running
from covey.streams import uniform


@dataclass(frozen=True)
class Flight:
    """Steps on their way, and where their tokens will be. None: a row that nobody waits for."""

    rows: tuple[Running | None, ...]
    steps: int
    ids_BT: Tensor
    logprobs_BT: Tensor
    landed: torch.cuda.Event | None  # None where nothing is asynchronous

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        if self.landed is not None:
            self.landed.synchronize()
        return self.ids_BT.tolist(), self.logprobs_BT.tolist()


class GraphStep:
    """What the attention of a captured step reads and writes."""

    def __init__(self, cache: KvCache, table_BN: Tensor, position_B: Tensor, splits: int) -> None:
        assert cache.keys is not None and cache.values is not None
        self.keys, self.values = cache.keys, cache.values
        self.table_BN = table_BN
        self.position_B = position_B
        self.splits = splits

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        found: Tensor = paged_attention(
            q, k, v, self.keys, self.values, layer, self.table_BN, self.position_B, scale, window or 0, self.splits
        )
        return found


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
        self.loaded: list[tuple[Running, int] | None] = []  # who is in the buffers, and how many blocks they had
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.layers = list(attention.backbone(model).layers)
        self.joined = JoinedLayers(self.layers)

    def launch(self, rows: Sequence[Running | None], steps: int, ahead: int = 0) -> Flight:
        """The next `steps` tokens of every sequence. `ahead`: steps of a flight of the same rows that is on its way."""
        graph, _ = self._graph(self._size(len(rows)), draws=True)
        self._load(rows, ahead)
        numbers = [[uniform(r.sampling.seed, len(r.ids) + ahead + t) if r else 0.0 for t in range(steps)] for r in rows]
        self._send(self.uniform_BT[: len(rows), :steps], numbers)
        self.step_B.zero_()
        for _ in range(steps):
            graph.replay()
        found = [self._fetch(out[: len(rows), :steps]) for out in (self.out_ids_BT, self.out_logprobs_BT)]
        landed = torch.cuda.Event() if self.ids_B.is_cuda else None
        if landed is not None:
            landed.record()
        return Flight(tuple(rows), steps, found[0], found[1], landed)

    def logits(self, rows: Sequence[Running]) -> Tensor:
        """Of the next token, for who draws in another way."""
        graph, logits_BV = self._graph(self._size(len(rows)), draws=False)
        self._load(rows, 0)
        self.loaded = []
        graph.replay()
        return logits_BV[: len(rows)]

    def _size(self, rows: int) -> int:
        """The batch that is captured for so many rows: powers of two, and halves between them."""
        size = 1
        while size < rows:
            size = (
                size * 3 // 2
                if size & (size - 1) == 0 and size >= 8 and size * 3 // 2 >= rows
                else 1 << size.bit_length()
            )
        return min(size, len(self.ids_B))

    def _load(self, rows: Sequence[Running | None], ahead: int) -> None:
        """Fill the buffers. Rows that are where they were have their next token and position there already."""
        size, width, scratch = self._size(len(rows)), self.table_BN.shape[1], self.cache.scratch
        spare: list[None] = [None] * (size - len(rows))
        now = [None if row is None else (row, len(row.blocks)) for row in rows]
        known = [None if entry is None else entry[0] for entry in self.loaded]
        stays = len(known) == len(rows) and all(row is None or row is old for row, old in zip(rows, known, strict=True))
        assert stays or not ahead, "what is on its way knows only the rows it left with"
        if now != self.loaded:
            blocks = [[] if row is None else row.blocks for row in (*rows, *spare)]
            self._send(self.table_BN[:size], [b + [scratch] * (width - len(b)) for b in blocks])
        if not stays:
            everyone = (*rows, *spare)
            self._send(self.ids_B[:size], [0 if row is None else row.next for row in everyone])
            self._send(self.position_B[:size], [0 if row is None else row.cached for row in everyone])
            self._send(self.temperature_B[:size], [row.sampling.temperature if row else 0.0 for row in everyone])
        elif empty := [n for n, row in enumerate((*rows, *spare)) if row is None]:
            # Their positions move on with the others': back, before they leave the table.
            at = torch.empty(len(empty), dtype=torch.int64, device=self.position_B.device)
            self._send(at, empty)
            self.position_B.index_fill_(0, at, 0)
        self.loaded = now

    def _send(self, target: Tensor, values: Any) -> None:
        """To the GPU without waiting for it."""
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
        """Runs the step a few times on the scratch block first: kernels are compiled, and nothing of value is hurt."""
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
            self.joined.active(),
            layers_compiled(self.layers if self.compiled else ()),
        ):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._step(size, draws)
                    self.step_B.zero_()
            torch.cuda.current_stream().wait_stream(stream)
            # Other threads may allocate and copy meanwhile, as one that saves a checkpoint does.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                logits_BV = self._step(size, draws)
        self.pool = self.pool or graph.pool()
        for buffer, before in zip(self._buffers(), kept, strict=True):
            buffer.copy_(before)
        return graph, logits_BV

    def _buffers(self) -> tuple[Tensor, ...]:
        return self.ids_B, self.position_B, self.step_B, self.table_BN


class layers_compiled:
    """While this lasts, the decoder layers run compiled, all by the same code."""

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
#
# Decoder layers with fewer and larger kernels, for decoding on a GPU: one product for queries, keys and values, one
# for gate and up; positions turn queries and keys inside attention.
#
# The weights stay the learner's own parameters. Those that are multiplied together are moved side by side in memory,
# each parameter a view of its part, so that an update of one is an update of the whole. Layers that are not
# built as Llama's run as they are, and so do layers with adapters.


class JoinedLayers:
    def __init__(self, layers: Sequence[Any]) -> None:
        self.patches: list[tuple[Any, Any]] = []
        for layer in layers:
            attend, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
            if type(attend).__name__ in FUSED_ATTENTION and _join_attention(attend):
                self.patches.append((attend, MethodType(_attention, attend)))
            if type(mlp).__name__ in FUSED_MLP and _join_mlp(mlp):
                self.patches.append((mlp, MethodType(_mlp, mlp)))

    @contextmanager
    def active(self) -> Iterator[None]:
        """While this lasts, the layers compute one new token of each sequence, joined."""
        for module, forward in self.patches:
            module.forward = forward
        try:
            yield
        finally:
            for module, _ in self.patches:
                del module.forward


def _attention(self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any) -> Any:
    step = attention.current_step()
    qkv = linear(hidden_states[:, 0], self.joined_weight, self.joined_bias)
    cos, sin = (x[:, 0] for x in position_embeddings)
    out = joined_attention(
        qkv, cos, sin, self.joined_norms, step.keys, step.values, self.layer_idx, step.table_BN, step.position_B,
        self.scaling, self.joined_window, step.splits, self.joined_eps,
    )  # fmt: skip
    return self.o_proj(out.flatten(2)), None


def _mlp(self: Any, x: Tensor) -> Any:
    gate, up = linear(x, self.joined_weight, self.joined_bias).chunk(2, -1)
    return self.down_proj(self.act_fn(gate) * up)


def _join_attention(module: Any) -> bool:
    linears = (module.q_proj, module.k_proj, module.v_proj)
    if not _plain(linears):
        return False
    norms = (module.q_norm, module.k_norm) if hasattr(module, "q_norm") else None
    module.joined_weight = side_by_side([x.weight for x in linears])
    module.joined_bias = _biases(linears)
    module.joined_norms = None if norms is None else side_by_side([x.weight for x in norms]).view(2, -1)
    module.joined_eps = 0.0 if norms is None else norms[0].variance_epsilon
    own = type(module).__name__ != "MistralAttention"
    window = getattr(module, "sliding_window", None) if own else getattr(module.config, "sliding_window", None)
    module.joined_window = window or 0
    return True


def _join_mlp(module: Any) -> bool:
    linears = (module.gate_proj, module.up_proj)
    if not _plain(linears):
        return False
    module.joined_weight = side_by_side([x.weight for x in linears])
    module.joined_bias = _biases(linears)
    return True


def _plain(linears: Sequence[Any]) -> bool:
    return all(type(x) is nn.Linear for x in linears) and len({x.bias is None for x in linears}) == 1


def _biases(linears: Sequence[Any]) -> Tensor | None:
    return None if linears[0].bias is None else side_by_side([x.bias for x in linears])


@torch.no_grad()
def side_by_side(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor, of whose rows each parameter is a part from now on. Where they lie so already, nothing moves."""
    places = [p.data_ptr() for p in parameters]
    ends = [place + p.numel() * p.element_size() for place, p in zip(places, parameters, strict=True)]
    first, count = parameters[0], sum(len(p) for p in parameters)
    one = len({p.untyped_storage().data_ptr() for p in parameters}) == 1
    if one and places[1:] == ends[:-1]:
        return first.data.as_strided((count, *first.shape[1:]), first.stride())
    whole = torch.cat([p.data for p in parameters])
    for p, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        p.data = part
    return whole
