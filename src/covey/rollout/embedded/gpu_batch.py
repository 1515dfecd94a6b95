"""Decoding on a GPU: one step is captured as a CUDA graph and replayed; the host looks at the tokens only now and then.

Everything a step changes lies in buffers on the GPU: the tokens to feed, their positions, the blocks of each sequence,
the uniform numbers, what was drawn. So the next steps can be sent off before the tokens of the last are read (a
`Flight`), and the GPU does not wait for the host. A graph is captured for each size of the batch (rounded up); rows
without a sequence write to the cache's scratch block. The decoder layers are compiled once for all layers and sizes,
with their products joined (`joined.py`); attention is a kernel (`kernels.py`).

Shapes: B rows of the batch, N blocks of a sequence, T steps between two looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.memory import cache_tokens, grown
from covey.rollout.embedded import attention
from covey.rollout.embedded.allocation import BlockManager
from covey.rollout.embedded.cache import KvCache
from covey.rollout.embedded.fused_layers import JoinedLayers
from covey.rollout.embedded.kernels import draw_and_advance, paged_attention, splits_for
from covey.rollout.embedded.runner import Drawn, Runner, draw_next, truncates
from covey.rollout.embedded.scheduler import Running, Scheduler, refuse
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


# -- The batch on a GPU: sequences in small blocks, several captured steps before the host looks -----------------------

BLOCK = 64  # tokens
STEPS = 8  # between two looks of the host
KEEP = 0.75  # of the rows of a flight must go on for another to follow it unread


class PagedBatch:
    """Captured steps know the cache's address, so it stays where it is. A larger one is made when nobody is in the old
    one; until then, who came waits."""

    def __init__(
        self, model: Any, *, max_rows: int, longest: int | None, memory: float, eager: bool, compiled: bool
    ) -> None:
        """`longest`: tokens that no sequence exceeds, if known. `eager`: nothing is captured."""
        self.model = model
        self.max_rows = max_rows
        self.longest = longest
        self.memory = memory
        self.eager = eager
        self.compiled = compiled
        self.room = 0  # tokens that memory has room for
        self.size = 0  # tokens of a sequence that the cache is made for
        self.scheduler = Scheduler(BlockManager(0, BLOCK), 0)
        self._runner: Runner | None = None
        self._decoder: GraphDecoder | None = None
        self._flight: Flight | None = None  # steps whose tokens were not read yet

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def enter(self, queue: deque[Running]) -> list[Running]:
        """Who can enter does; the others stay in the queue or wait with the scheduler. Who was refused."""
        if self._runner is None:
            self.room = self._affordable()
        refused = refuse(queue, self.room)
        self._make_room(queue)
        self._hand_over(queue)
        if self._runner is not None:
            self._runner.prefill(self.scheduler.admit())
        return refused

    def _make_room(self, queue: deque[Running]) -> None:
        longest = max((request.longest for request in queue), default=0)
        rows = min(self.max_rows, len(queue))
        if (longest > self.size or rows > self.scheduler.max_rows) and not self.busy:
            self._build(longest, grown(self.scheduler.max_rows, rows, self.max_rows))

    def _build(self, longest: int, rows: int) -> None:
        self._runner = self._decoder = self._flight = None  # the old cache goes before the new one comes
        self.room = self._affordable()
        self.size = min(grown(self.size, longest, self.longest, BLOCK), self.room)
        blocks = min(rows * self.size, self.room) // BLOCK
        layers = int(self.model.config.get_text_config(decoder=True).num_hidden_layers)
        self.scheduler = Scheduler(BlockManager(blocks, BLOCK), rows)
        self._runner = Runner(self.model, KvCache(blocks, BLOCK, layers))

    def _affordable(self) -> int:
        return cache_tokens(self.model, self.memory) // BLOCK * BLOCK

    def _hand_over(self, queue: deque[Running]) -> None:
        """In their order, until one needs a larger cache. Where there could be more rows, only as many as there are:
        the rest show how many are missing."""
        scheduler = self.scheduler
        final = scheduler.max_rows == self.max_rows
        while queue and queue[0].longest <= self.size:
            if not final and len(scheduler.running) + len(scheduler.waiting) >= scheduler.max_rows:
                break
            scheduler.add(queue.popleft())

    def sample(self) -> Drawn:
        """A token for everybody, or several, of which the last may lie beyond an answer's end."""
        scheduler, runner = self.scheduler, self._runner
        if not scheduler.running:
            return []
        assert runner is not None and isinstance(runner.cache, KvCache)
        if self.eager or runner.cache.keys is None:  # a graph needs to know its address
            scheduler.reserve(1)
            rows = list(scheduler.running)
            return draw_next(rows, runner.decode(rows))
        return self._sample_ahead(runner.cache)

    def _sample_ahead(self, cache: KvCache) -> Drawn:
        """Reads what is on its way; before that, if the rows stay, sends off what comes after it."""
        flight, self._flight = self._flight, None
        if flight is None or not any(self._alive(row) for row in flight.rows):
            rows = list(self.scheduler.running)
            decoder = self._graphs(cache)
            if any(truncates(row.sampling) for row in rows):
                self.scheduler.reserve(1)
                rows = list(self.scheduler.running)
                return draw_next(rows, decoder.logits(rows))
            steps = min(STEPS, max(row.left for row in rows))
            self.scheduler.reserve(steps)
            flight = decoder.launch(list(self.scheduler.running), steps)
        self._flight = self._next_flight(flight)
        found = zip(flight.rows, *flight.read(), strict=True)
        return [(row, ids, logprobs) for row, ids, logprobs in found if row is not None and self._alive(row)]

    def _next_flight(self, flight: Flight) -> Flight | None:
        """The same rows go on, if nobody has entered, few have left, and memory allows. Who will have finished by then
        is left out."""
        staying = [row if row and self._alive(row) and row.left > flight.steps else None for row in flight.rows]
        alive = [row for row in staying if row is not None]
        entered = len([row for row in flight.rows if self._alive(row)]) < len(self.scheduler.running)
        if not alive or entered or len(alive) < KEEP * len(staying):
            return None
        steps = min(STEPS, max(row.left for row in alive) - flight.steps)
        if not self.scheduler.reserve_if_free(flight.steps + steps):
            return None
        assert self._decoder is not None
        return self._decoder.launch(staying, steps, ahead=flight.steps)

    def _alive(self, row: Running | None) -> bool:
        return row is not None and bool(row.blocks)  # who left has given them back

    def _graphs(self, cache: KvCache) -> GraphDecoder:

        if self._decoder is None:
            blocks = self.scheduler.blocks.count(self.size + 2 * STEPS)  # steps beyond an answer's end have a place
            rows = self.scheduler.max_rows
            self._decoder = GraphDecoder(self.model, cache, rows=rows, blocks=blocks, compiled=self.compiled)
        return self._decoder

    def finish(self, request: Running) -> None:
        self.scheduler.finish(request)

    def forget(self) -> None:
        """New weights: what the old ones computed is not reused, except by answers that have begun with it. Tokens that
        were launched and not read yet are drawn again; prompts whose first token is not drawn yet are recomputed."""
        self.scheduler.blocks.forget()
        self.scheduler.restart_prompts()
        self._flight = None
        if self._decoder is not None:
            self._decoder.loaded = []
