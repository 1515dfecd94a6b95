"""The batch on a GPU: a paged cache, and decode runs of several captured steps between two reads of the host."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from covey.memory import cache_tokens, grown_size
from covey.rollout.embedded.allocation import BlockManager
from covey.rollout.embedded.cache import KvCache
from covey.rollout.embedded.runner import Drawn, Runner, draw_next, truncates
from covey.rollout.embedded.scheduler import RequestState, Scheduler, reject_too_long

if TYPE_CHECKING:
    from covey.rollout.embedded.graphs import DecodeRun, GraphDecoder

BLOCK = 64  # tokens of a block of the cache
STEPS = 8  # of a decode run: the host reads the tokens after each run
KEEP = 0.75  # share of the rows of a run that must continue for the next run to be launched before this one is read


class PagedBatch:
    """The batch on a GPU. CUDA graphs contain the address of the cache, so it cannot grow in place. A larger cache is
    allocated once the old one is idle; until then, requests that need it wait."""

    def __init__(
        self, model: Any, *, max_rows: int, longest: int | None, memory: float, eager: bool, compiled: bool
    ) -> None:
        """`longest`: the most tokens of a sequence, if known. `eager`: no captured steps."""
        self.model = model
        self.max_rows = max_rows
        self.longest = longest
        self.memory = memory
        self.eager = eager
        self.compiled = compiled
        self.capacity = 0  # tokens that fit into memory
        self.size = 0  # the longest sequence that the cache was allocated for
        self.scheduler = Scheduler(BlockManager(0, BLOCK), 0)
        self._runner: Runner | None = None
        self._decoder: GraphDecoder | None = None
        self._run: DecodeRun | None = None  # launched and not read yet

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def enter(self, queue: deque[RequestState]) -> list[RequestState]:
        """Admit the requests that fit; others stay in the queue or wait in the scheduler. Returns the rejected ones."""
        if self._runner is None:
            self.capacity = self._cache_capacity()
        rejected = reject_too_long(queue, self.capacity)
        self._grow(queue)
        self._submit(queue)
        if self._runner is not None:
            self._runner.prefill(self.scheduler.admit())
        return rejected

    def _grow(self, queue: deque[RequestState]) -> None:
        longest = max((request.max_length for request in queue), default=0)
        rows = min(self.max_rows, len(queue))
        if (longest > self.size or rows > self.scheduler.max_rows) and not self.busy:
            self._allocate(longest, grown_size(self.scheduler.max_rows, rows, self.max_rows))

    def _allocate(self, longest: int, rows: int) -> None:
        self._runner = self._decoder = self._run = None  # frees the old cache before allocating the new one
        self.capacity = self._cache_capacity()
        self.size = min(grown_size(self.size, longest, self.longest, BLOCK), self.capacity)
        blocks = min(rows * self.size, self.capacity) // BLOCK
        layers = int(self.model.config.get_text_config(decoder=True).num_hidden_layers)
        self.scheduler = Scheduler(BlockManager(blocks, BLOCK), rows)
        self._runner = Runner(self.model, KvCache(blocks, BLOCK, layers))

    def _cache_capacity(self) -> int:
        return cache_tokens(self.model, self.memory) // BLOCK * BLOCK

    def _submit(self, queue: deque[RequestState]) -> None:
        """Pass requests to the scheduler, in order, until one needs a larger cache. If the cache can still grow, pass
        at most one per row: the rest of the queue then shows how many rows are missing."""
        scheduler = self.scheduler
        final = scheduler.max_rows == self.max_rows
        while queue and queue[0].max_length <= self.size:
            if not final and len(scheduler.running) + len(scheduler.waiting) >= scheduler.max_rows:
                break
            scheduler.add(queue.popleft())

    def sample(self) -> Drawn:
        """One or several tokens for every running request. The last ones may be past the end of a completion."""
        scheduler, runner = self.scheduler, self._runner
        if not scheduler.running:
            return []
        assert runner is not None and isinstance(runner.cache, KvCache)
        if self.eager or runner.cache.keys is None:  # not allocated yet: a graph needs its address
            scheduler.reserve(1)
            rows = list(scheduler.running)
            return draw_next(rows, runner.decode(rows))
        return self._sample_ahead(runner.cache)

    def _sample_ahead(self, cache: KvCache) -> Drawn:
        """Read the run in progress, or a new one. Before reading, launch the next run if the rows stay the same."""
        run, self._run = self._run, None
        if run is None or not any(self._is_running(row) for row in run.rows):
            rows = list(self.scheduler.running)
            decoder = self._graphs(cache)
            if any(truncates(row.sampling) for row in rows):
                self.scheduler.reserve(1)
                rows = list(self.scheduler.running)
                return draw_next(rows, decoder.logits(rows))
            steps = min(STEPS, max(row.remaining for row in rows))
            self.scheduler.reserve(steps)
            run = decoder.launch(list(self.scheduler.running), steps)
        self._run = self._next_run(run)
        drawn = zip(run.rows, *run.read(), strict=True)
        return [(row, ids, logprobs) for row, ids, logprobs in drawn if row is not None and self._is_running(row)]

    def _next_run(self, run: DecodeRun) -> DecodeRun | None:
        """Launch a run with the same rows, if no request has entered, few have finished, and enough blocks are free.
        Rows that will have finished before it starts are empty."""
        staying = [row if row and self._is_running(row) and row.remaining > run.steps else None for row in run.rows]
        continuing = [row for row in staying if row is not None]
        entered = len([row for row in run.rows if self._is_running(row)]) < len(self.scheduler.running)
        if not continuing or entered or len(continuing) < KEEP * len(staying):
            return None
        steps = min(STEPS, max(row.remaining for row in continuing) - run.steps)
        if not self.scheduler.reserve_if_free(run.steps + steps):
            return None
        assert self._decoder is not None
        return self._decoder.launch(staying, steps, ahead=run.steps)

    def _is_running(self, row: RequestState | None) -> bool:
        return row is not None and bool(row.blocks)  # a request that has left the batch has released its blocks

    def _graphs(self, cache: KvCache) -> GraphDecoder:
        from covey.rollout.embedded.graphs import GraphDecoder

        if self._decoder is None:
            blocks = self.scheduler.blocks.count(self.size + 2 * STEPS)  # room for steps past the end of a completion
            rows = self.scheduler.max_rows
            self._decoder = GraphDecoder(self.model, cache, rows=rows, blocks=blocks, compiled=self.compiled)
        return self._decoder

    def finish(self, request: RequestState) -> None:
        self.scheduler.finish(request)

    def flush(self) -> None:
        """Drop cached prefixes: the weights have changed. Requests that have sampled tokens keep their blocks; a run
        that was not read yet is discarded and sampled again; prompts without a sampled token are computed again."""
        self.scheduler.blocks.flush()
        self.scheduler.preempt_prefills()
        self._run = None
        if self._decoder is not None:
            self._decoder.loaded = []
