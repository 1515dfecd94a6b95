"""The batch on a GPU: a paged cache, and decode runs of several captured steps between two reads of the host.

The GPU never waits for the host: while a run of steps is computed, the host reads the previous one, admits requests,
launches their prompts and then the next run, which includes them (graphs.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from covey.memory import cache_tokens, grown_size
from covey.rollout.embedded.allocation import BlockManager
from covey.rollout.embedded.cache import KvCache
from covey.rollout.embedded.runner import Drawn, Runner, draw_next, truncates
from covey.rollout.embedded.scheduler import PrefillGroup, RequestState, Scheduler, reject_too_long

if TYPE_CHECKING:
    from torch import Tensor

    from covey.rollout.embedded.graphs import DecodeRun, GraphRunner

BLOCK = 64  # tokens of a block of the cache
STEPS = 8  # of a decode run: the host reads the tokens after each run
KEEP = 0.75  # while requests wait: share of the rows that must continue for the next run to be launched ahead


class PagedBatch:
    """The batch on a GPU. CUDA graphs contain the address of the cache, so it cannot grow in place. A larger cache is
    allocated once the old one is idle; until then, requests that need it wait."""

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int,
        longest: int | None,
        memory: float,
        eos_ids: Sequence[int],
        eager: bool,
        compiled: bool,
        kept: int = 0,
    ) -> None:
        """`longest`: the most tokens of a sequence, if known. `eager`: no captured passes. `kept`: sequences for which
        the cache has room, memory permitting, if these are more than the rows: episodes wait for tools between turns,
        and their next turn continues from the cache."""
        self.model = model
        self.eos_ids = eos_ids
        self.max_rows = max_rows
        self.kept = kept
        self.longest = longest
        self.memory = memory
        self.eager = eager
        self.compiled = compiled
        self.capacity = 0  # tokens that fit into memory
        self.size = 0  # the longest sequence that the cache was allocated for
        self.scheduler = Scheduler(BlockManager(0, BLOCK), 0)
        self._runner: Runner | None = None
        self._like: Tensor | None = None  # a key of the cache, as `KvCache.layer` takes it
        self._graphs: GraphRunner | None = None
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
            self._prefill(self._runner, self.scheduler.admissions())
        return rejected

    def enter_waiting(self) -> None:
        """Admit requests that wait for a row or for blocks, once others have left."""
        if self.scheduler.waiting:
            self.enter(deque())

    def _prefill(self, runner: Runner, admissions: Iterator[PrefillGroup]) -> None:
        """Compute the prompts of the groups, and copy the partly filled block that their followers do not share. The
        GPU begins with the first groups while others are admitted."""
        self._graphs = self._graphs or self._make_graphs(runner.cache)
        if self._graphs is None:
            runner.prefill(list(admissions))
            return
        for groups in self._graphs.waves(admissions):
            if groups[0].has_new_images:
                runner.prefill(groups)
                continue
            self._graphs.prefill([(group.leader, group.shared, group.leader.cached) for group in groups])
            pairs = [
                (source, target)
                for group in groups
                for follower in group.members[1:]
                for source, target in zip(group.leader.blocks, follower.blocks, strict=True)
                if source != target
            ]
            runner.cache.copy(pairs, columns=BLOCK)

    def _make_graphs(self, cache: Any) -> GraphRunner | None:
        """None without graphs, or while the cache is not allocated: a graph contains its address."""
        if self.eager or cache.keys is None:
            return None
        self._like = cache.keys.new_empty(1, cache.keys.shape[2], 1, cache.keys.shape[4])
        from covey.rollout.embedded.graphs import GraphRunner

        return GraphRunner(
            self.model,
            cache,
            rows=self.scheduler.max_rows,
            blocks=self.scheduler.blocks.count(self.size),
            eos_ids=self.eos_ids,
            compiled=self.compiled,
        )

    def _grow(self, queue: deque[RequestState]) -> None:
        longest = max((request.max_length for request in queue), default=0)
        rows = min(self.max_rows, len(queue))
        if (longest > self.size or rows > self.scheduler.max_rows) and not self.busy:
            self._allocate(longest, grown_size(self.scheduler.max_rows, rows, self.max_rows))

    def _allocate(self, longest: int, rows: int) -> None:
        self._runner = self._graphs = self._run = None  # frees the old cache before allocating the new one
        self.capacity = self._cache_capacity()
        self.size = min(grown_size(self.size, longest, self.longest, BLOCK), self.capacity)
        blocks = min(max(rows, self.kept) * self.size, self.capacity) // BLOCK
        layers = int(self.model.config.get_text_config(decoder=True).num_hidden_layers)
        self.scheduler = Scheduler(BlockManager(blocks, BLOCK), rows)
        cache = KvCache(blocks, BLOCK, layers)
        if self._like is not None:  # otherwise the first prompt allocates the cache
            cache.layer(0, self._like)
        self._runner = Runner(self.model, cache)

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
        """One or several tokens for every running request. The last ones may be past a stop string."""
        scheduler, runner = self.scheduler, self._runner
        if not scheduler.running:
            self._run = None
            return []
        assert runner is not None and isinstance(runner.cache, KvCache)
        self._graphs = self._graphs or self._make_graphs(runner.cache)
        if self._graphs is None:
            scheduler.reserve(1)
            rows = list(scheduler.running)
            return draw_next(rows, runner.decode(rows))
        return self._sample_ahead(self._graphs)

    def _sample_ahead(self, graphs: GraphRunner) -> Drawn:
        """Read the run in progress, or a new one. Before reading, launch the next one."""
        run, self._run = self._run, None
        if any(truncates(row.sampling) for row in self.scheduler.running):
            if run is not None:
                return self._read(run)
            self.scheduler.reserve(1)
            rows = list(self.scheduler.running)
            return draw_next(rows, graphs.logits(rows))
        if run is None:
            self.scheduler.reserve(STEPS)
            run = graphs.launch(list(self.scheduler.running), STEPS, {})
        self._run = self._next_run(graphs, run)
        return self._read(run)

    def _next_run(self, graphs: GraphRunner, run: DecodeRun) -> DecodeRun | None:
        """Launch the steps after a run that is not read yet, with the requests that entered meanwhile. Not if blocks
        are missing, or if many requests will have ended and others wait for their rows."""
        ahead = {row: run.steps for row in run.rows if row is not None}
        rows = [row for row in self.scheduler.running if row.remaining > ahead.get(row, 0)]
        if not rows or (self.scheduler.waiting and len(rows) < KEEP * len(ahead)):
            return None
        return graphs.launch(rows, STEPS, ahead) if self.scheduler.reserve_if_free(run.steps + STEPS) else None

    def _read(self, run: DecodeRun) -> Drawn:
        # Without those that left: their blocks are released.
        drawn: Drawn = [each for each in run.read() if each[0].blocks]
        assert all(ids for _, ids, _ in drawn), "a slot is idle whose request goes on"
        return drawn

    def drain(self) -> Drawn:
        """The tokens of the run in progress: after this, weights may change."""
        run, self._run = self._run, None
        return [] if run is None else self._read(run)

    def finish(self, request: RequestState) -> None:
        self.scheduler.finish(request)

    def flush(self) -> None:
        """Drop cached prefixes: the weights have changed. Requests that have sampled tokens keep their blocks; a run
        that was not read yet is discarded and sampled again; prompts without a sampled token are computed again."""
        self.scheduler.blocks.flush()
        self.scheduler.preempt_prefills()
        if self._run is not None and self._graphs is not None:
            self._graphs.slots.forget()
        self._run = None
