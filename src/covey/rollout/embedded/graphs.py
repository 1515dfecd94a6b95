"""The engine's forward passes on a GPU, captured as CUDA graphs: decode steps and chunks of prompts.

Decode. The batch has fixed slots. All state of a slot is on the GPU: the token to feed, its position, the blocks of its
sequence, its temperature, the position at which it ends. Requests enter and leave by edits of single slots, which are
launched like everything else, so the GPU never waits for the host: a run of several steps (`DecodeRun`) is launched
before the previous one is read. A slot whose sequence has ended is idle (position −1) from the next step on.

Prefill. Prompt tokens of any number of sequences are concatenated, each sequence padded to whole tiles, and computed in
chunks: a row of the model's input is a single token, as in decoding. Prompts with new images are computed without a
graph (`Runner.prefill`). Text after an image of a Qwen-VL model has other positions than its index: the difference is
kept for each slot and prompt token (`shift`).

A pass is captured for a few sizes, each a quarter of the next, when they are first needed. A capture takes as long as
hundreds of steps, and a larger pass computes the same with idle rows, so the sizes in between are captured only once
they have been needed often.

The decoder layers are compiled once for all layers and sizes, with fused projections (`FusedLayers`); attention is a
Triton kernel (`kernels.py`).

Shapes: B slots of the batch, N blocks of a sequence, E edited slots or end tokens, S steps of a run, T prompt tokens,
I tiles of prompt tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from covey.models.families import FUSED_ATTENTION, FUSED_MLP, causal_lm, decoder, layers_of, vision_family
from covey.models.forwards import prepare_to_compile_layers, replaced_forwards
from covey.rollout.embedded import attention
from covey.rollout.embedded.cache import KvCache
from covey.rollout.embedded.gpu_batch import STEPS
from covey.rollout.embedded.kernels import (
    TILE,
    draw_and_advance,
    fused_attention,
    fused_prefill,
    paged_attention,
    paged_prefill,
    splits_for,
)
from covey.rollout.embedded.scheduler import PrefillGroup, RequestState
from covey.rollout.embedded.slots import Slots
from covey.streams import uniforms

CHUNKS = (64, 128, 256, 512, 1024, 1536, 2048)  # prompt tokens of a pass
FEWEST = 8  # rows of a decode step: fewer are not faster
WORTH = 1000  # uses after which a pass of a size in between is captured

Span = tuple[RequestState, int, int]  # tokens start … end of a request


@dataclass(frozen=True)
class DecodeRun:
    """Several steps launched at once, and the host buffers that will hold their tokens. None: an empty slot."""

    rows: tuple[RequestState | None, ...]
    steps: int
    ids_BS: Tensor
    logprobs_BS: Tensor
    finished: torch.cuda.Event | None  # None without a GPU

    def read(self) -> list[tuple[RequestState, list[int], list[float]]]:
        """The sampled tokens of each request, and their log-probs. Waits until the GPU has sampled them."""
        if self.finished is not None:
            self.finished.synchronize()
        drawn = zip(self.rows, self.ids_BS.tolist(), self.logprobs_BS.tolist(), strict=True)
        return [(row, ids[: _sampled(ids)], logprobs[: _sampled(ids)]) for row, ids, logprobs in drawn if row]


def _sampled(ids: list[int]) -> int:
    return ids.index(-1) if ids[-1] == -1 else len(ids)  # an idle row outputs −1


class DecodeStep:
    """Attention of a captured decode step, over fixed buffers."""

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

    def attend_fused(self, module: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out: Tensor = fused_attention(
            qkv, cos, sin, module.fused_norms, self.keys, self.values, module.layer_idx, self.table_BN, self.position_B,
            module.scaling, module.fused_window, self.splits, module.fused_eps,
        )  # fmt: skip
        return out


class PrefillStep:
    """Attention of a captured chunk of prompts, over fixed buffers."""

    def __init__(self, cache: KvCache, table_IN: Tensor, position_T: Tensor) -> None:
        assert cache.keys is not None and cache.values is not None
        self.keys, self.values = cache.keys, cache.values
        self.table_IN = table_IN
        self.position_T = position_T

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        out: Tensor = paged_prefill(
            q, k, v, self.keys, self.values, layer, self.table_IN, self.position_T, scale, window or 0
        )
        return out

    def attend_fused(self, module: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out: Tensor = fused_prefill(
            qkv, cos, sin, module.fused_norms, self.keys, self.values, module.layer_idx, self.table_IN, self.position_T,
            module.scaling, module.fused_window, module.fused_eps,
        )  # fmt: skip
        return out


class GraphRunner:
    """Captured passes over a cache, and the state of `rows` slots on the GPU."""

    def __init__(
        self, model: Any, cache: KvCache, *, rows: int, blocks: int, eos_ids: Sequence[int], compiled: bool
    ) -> None:
        """`blocks`: the most blocks of a sequence."""
        device = model.get_input_embeddings().weight.device
        self.model = model
        self.cache = cache
        self.compiled = compiled
        self.slots = Slots(rows)
        self.sizes = batch_sizes(rows)
        self.ids_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.position_B = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.limit_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.shift_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature_B = torch.ones(rows, dtype=torch.float32, device=device)
        self.table_BN = torch.zeros((rows, blocks), dtype=torch.int32, device=device)
        self.step_B = torch.zeros(rows, dtype=torch.int32, device=device)
        self.uniform_BS = torch.zeros(rows, STEPS, dtype=torch.float32, device=device)
        self.out_ids_BS = torch.zeros(rows, STEPS, dtype=torch.int64, device=device)
        self.out_logprobs_BS = torch.zeros(rows, STEPS, dtype=torch.float32, device=device)
        count = 1 << (len(eos_ids) - 1).bit_length() if eos_ids else 1
        self.end_E = torch.tensor([*eos_ids, *[-1] * (count - len(eos_ids))], dtype=torch.int64, device=device)
        self.prompt_ids_T = torch.zeros(CHUNKS[-1], dtype=torch.int64, device=device)
        self.prompt_position_T = torch.full((CHUNKS[-1],), -1, dtype=torch.int64, device=device)
        self.prompt_shift_T = torch.zeros(CHUNKS[-1], dtype=torch.int64, device=device)
        self.prompt_table_IN = torch.zeros((CHUNKS[-1] // TILE, blocks), dtype=torch.int32, device=device)
        self.captured: dict[tuple[str, int], Captured] = {}
        self.wanted: Counter[tuple[str, int]] = Counter()  # uses of sizes that are not captured
        self.pool: Any = None
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        lm = causal_lm(model)
        family = vision_family(lm.config)
        self.shifts = family is not None and family.grid
        self.layers = layers_of(decoder(lm))
        self.fused = FusedLayers(self.layers)

    # -- decode ----------------------------------------------------------------------------------------------------

    def launch(self, rows: Sequence[RequestState], steps: int, ahead: dict[RequestState, int]) -> DecodeRun:
        """Launch the next `steps` tokens of every sequence. `ahead`: tokens that were launched and not read yet."""
        placed = self._place(rows)
        captured = self._decode(len(placed), draws=True, steps=steps)
        streams = ((r.sampling.seed, len(r.ids) + ahead.get(r, 0)) if r else (0, 0) for r in placed)
        self._send(self.uniform_BS[: len(placed), :steps], uniforms(streams, steps))
        self.step_B.zero_()
        for _ in range(steps):
            captured.replay()
        ids, logprobs = (self._fetch(out[: len(placed), :steps]) for out in (self.out_ids_BS, self.out_logprobs_BS))
        finished = torch.cuda.Event() if self.ids_B.is_cuda else None
        if finished is not None:
            finished.record()
        return DecodeRun(tuple(placed), steps, ids, logprobs, finished)

    def logits(self, rows: Sequence[RequestState]) -> Tensor:
        """Logits of the next token, for sampling outside of the graph. No run may be unread."""
        self.slots.forget()
        captured = self._decode(len(self._place(rows)), draws=False, steps=1)
        captured.replay()
        self.slots.forget()
        return captured.logits[: len(rows)]

    def _place(self, rows: Sequence[RequestState]) -> list[RequestState | None]:
        """Edit the slots on the GPU so that they hold these sequences. Returns what the slots in use hold."""
        edits = self.slots.arrange(rows, self._size)
        if edits.moves:
            source, target = (self._sent(column) for column in zip(*edits.moves, strict=True))
            for buffer in (
                *(self.ids_B, self.position_B, self.limit_B, self.shift_B),
                *(self.temperature_B, self.table_BN),
            ):
                buffer[target] = buffer[source]
        held = self.slots.requests
        if edits.changed:
            state = [
                (slot, row.next_token, row.cached, row.max_length - 1, row.position_shift)
                if (row := held[slot])
                else (slot, 0, -1, 0, 0)
                for slot in edits.changed
            ]
            slot_E, *columns = self._sent(state).unbind(1)
            for buffer, column in zip((self.ids_B, self.position_B, self.limit_B, self.shift_B), columns, strict=True):
                buffer[slot_E] = column
            heat = [row.sampling.temperature if (row := held[slot]) else 1.0 for slot in edits.changed]
            self.temperature_B[slot_E] = self._sent(heat)
        if edits.grown:
            tables = [row.blocks for slot in edits.grown if (row := held[slot])]
            width = max(map(len, tables))
            self.table_BN[self._sent(edits.grown), :width] = self._sent(_padded(tables, width)).int()
        return self.slots.used()

    def _size(self, rows: int) -> int:
        """The batch size for `rows` rows: powers of two and 1.5 times these."""
        return next(size for size in self.sizes if size >= rows)

    def _decode(self, rows: int, *, draws: bool, steps: int) -> Captured:
        """The captured step for `rows` slots, of which `steps` will be launched now."""
        kind = "draw" if draws else "logits"
        size = self._captured_size(kind, self._size(rows), self.sizes, steps)
        if (kind, size) not in self.captured:
            assert self.cache.keys is not None
            splits = splits_for(size, self.cache.keys.shape[2], self.processors)
            step = DecodeStep(self.cache, self.table_BN[:size], self.position_B[:size], splits)
            self.captured[kind, size] = self._capture(step, lambda: self._decode_step(size, draws))
        return self.captured[kind, size]

    def _captured_size(self, kind: str, size: int, sizes: Sequence[int], uses: int) -> int:
        """The size to use for `size`: the smallest that is captured already, or that is worth it."""
        if (kind, size) in self.captured:
            return size
        self.wanted[kind, size] += uses
        if self.wanted[kind, size] >= WORTH:
            return size
        larger = [other for name, other in self.captured if name == kind and other > size]
        return min(*larger, next(other for other in quarters(sizes) if other >= size), sizes[-1])

    def _decode_step(self, size: int, draws: bool) -> Tensor:
        position_B = self.position_B[:size].clamp_min(0)
        if self.shifts:
            position_B = position_B + self.shift_B[:size]
        out = self.model(input_ids=self.ids_B[:size, None], position_ids=position_B[:, None], use_cache=False)
        logits_BV: Tensor = out.logits[:, -1]
        if draws:
            draw_and_advance(
                logits_BV,
                self.temperature_B[:size],
                self.uniform_BS[:size],
                self.end_E,
                self.limit_B[:size],
                self.ids_B[:size],
                self.position_B[:size],
                self.step_B[:size],
                self.out_ids_BS[:size],
                self.out_logprobs_BS[:size],
            )
        return logits_BV

    # -- prefill ---------------------------------------------------------------------------------------------------

    def waves(self, admissions: Iterable[PrefillGroup]) -> Iterator[list[PrefillGroup]]:
        """Groups whose prompts fit into one pass, as they are admitted; those with new images by themselves."""
        wave: list[PrefillGroup] = []
        free = CHUNKS[-1]
        for group in admissions:
            tokens = -(-group.new_tokens // TILE) * TILE
            if wave and (group.has_new_images != wave[0].has_new_images or tokens > free):
                yield wave
                wave, free = [], CHUNKS[-1]
            wave.append(group)
            free -= tokens
        if wave:
            yield wave

    def prefill(self, spans: Sequence[Span]) -> None:
        """Compute these tokens into the cache. A span may continue one before it, or share blocks with it."""
        for chunk in chunks(spans):
            ids: list[int] = []
            places: list[int] = []
            shifts: list[int] = []
            tables: list[list[int]] = []  # of each tile
            for row, start, end in chunk:
                tiles = -(-(end - start) // TILE)
                padding = tiles * TILE - (end - start)
                ids += [*row.tokens_between(start, end), *[0] * padding]
                places += [*range(start, end), *[-1] * padding]
                shifts += [row.position_shift] * tiles * TILE  # all images are before these tokens
                tables += [row.blocks] * tiles
            needed = next(size for size in CHUNKS if size >= len(ids))
            size = self._captured_size("prefill", needed, CHUNKS, uses=1)
            width = max(map(len, tables))
            self._send(self.prompt_ids_T[: len(ids)], ids)
            self._send(self.prompt_position_T[:size], places + [-1] * (size - len(places)))
            if self.shifts:
                self._send(self.prompt_shift_T[: len(shifts)], shifts)
            self._send(self.prompt_table_IN[: len(tables), :width], _padded(tables, width))
            self._prefill(size).replay()

    def _prefill(self, size: int) -> Captured:
        if ("prefill", size) not in self.captured:
            step = PrefillStep(self.cache, self.prompt_table_IN[: size // TILE], self.prompt_position_T[:size])
            self.captured["prefill", size] = self._capture(step, lambda: self._prefill_step(size))
        return self.captured["prefill", size]

    def _prefill_step(self, size: int) -> Tensor:
        position_T = self.prompt_position_T[:size].clamp_min(0)
        if self.shifts:
            position_T = position_T + self.prompt_shift_T[:size]
        out = attention.backbone(self.model)(
            input_ids=self.prompt_ids_T[:size, None], position_ids=position_T[:, None], use_cache=False
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    # -- capture ---------------------------------------------------------------------------------------------------

    def _capture(self, step: attention.Step, run: Callable[[], Tensor]) -> Captured:
        """Warm up with all rows idle first, so that kernels are compiled and no cached token is overwritten."""
        kept = [buffer.clone() for buffer in self._state()]
        self.position_B.fill_(-1)
        self.prompt_position_T.fill_(-1)
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
                    run()
                    self.step_B.zero_()
            torch.cuda.current_stream().wait_stream(stream)
            # Other threads may allocate and copy meanwhile, e.g. to save a checkpoint.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                out = run()
        self.pool = self.pool or graph.pool()
        for buffer, before in zip(self._state(), kept, strict=True):
            buffer.copy_(before)
        return Captured(graph.replay, out)

    def _state(self) -> tuple[Tensor, ...]:
        return self.ids_B, self.position_B, self.step_B, self.prompt_position_T

    # -- copies between host and GPU -------------------------------------------------------------------------------

    def _sent(self, values: Sequence[Any]) -> Tensor:
        """A new tensor on the GPU, copied asynchronously."""
        source = torch.tensor(values)
        return source.pin_memory().to(self.ids_B.device, non_blocking=True) if self.ids_B.is_cuda else source

    def _send(self, target: Tensor, values: Any) -> None:
        """Copy to the GPU asynchronously."""
        source = torch.tensor(values, dtype=target.dtype)
        target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)

    def _fetch(self, source: Tensor) -> Tensor:
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        return host.copy_(source, non_blocking=True)


@dataclass(frozen=True)
class Captured:
    """A captured pass. `replay` runs it on the contents of the buffers; `logits` are those of the last replay."""

    replay: Callable[[], None]
    logits: Tensor


def batch_sizes(rows: int) -> list[int]:
    """Of decode steps, the largest last."""
    powers = [FEWEST << n for n in range(rows.bit_length())]
    return [*(size for size in sorted([*powers, *(size * 3 // 2 for size in powers)]) if size < rows), rows]


def quarters(sizes: Sequence[int]) -> list[int]:
    """The largest of the sizes, and each that is at most a quarter of the next, the smallest first."""
    found = [sizes[-1]]
    for size in reversed(sizes):
        if size <= found[0] / 4:
            found.insert(0, size)
    return found


def _padded(tables: Sequence[Sequence[int]], width: int) -> list[list[int]]:
    return [[*table, *[0] * (width - len(table))] for table in tables]


def chunks(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Divide tokens into passes of at most the largest chunk, in order. Every span of a pass takes whole tiles."""
    chunk: list[Span] = []
    free = CHUNKS[-1]
    for row, start, end in spans:
        while start < end:
            stop = min(end, start + free)
            chunk.append((row, start, stop))
            free -= -(-(stop - start) // TILE) * TILE
            start = stop
            if not free:
                yield chunk
                chunk, free = [], CHUNKS[-1]
    if chunk:
        yield chunk


def layers_compiled(layers: Sequence[Any]) -> AbstractContextManager[None]:
    """Run the decoder layers compiled in this context, all with the same code."""
    if layers:
        prepare_to_compile_layers()
    return replaced_forwards([(layer, torch.compile(layer.forward)) for layer in layers])


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

    def active(self) -> AbstractContextManager[None]:
        """Use the fused layers in this context. Each row of their input is one token."""
        return replaced_forwards(self.patches)


def _attention(self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any) -> Any:
    qkv = linear(hidden_states[:, 0], self.fused_weight, self.fused_bias)
    cos, sin = (x[:, 0] for x in position_embeddings)
    return self.o_proj(attention.current_step().attend_fused(self, qkv, cos, sin).flatten(2)), None


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
