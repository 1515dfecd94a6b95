"""The batch on a GPU: sequences in small blocks, several captured steps before the host looks."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from covey.rollout.embedded.blocks import BlockManager
from covey.rollout.embedded.cache import KvCache
from covey.rollout.embedded.memory import affordable_tokens, grown
from covey.rollout.embedded.runner import Runner
from covey.rollout.embedded.sampling import Drawn, draw_next, truncates
from covey.rollout.embedded.scheduler import Running, Scheduler, refuse

if TYPE_CHECKING:
    from covey.rollout.embedded.graphs import GraphDecoder

BLOCK = 64  # tokens


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
        self._runner = self._decoder = None  # the old cache goes before the new one comes
        self.room = self._affordable()
        self.size = min(grown(self.size, longest, self.longest, BLOCK), self.room)
        blocks = min(rows * self.size, self.room) // BLOCK
        layers = int(self.model.config.get_text_config(decoder=True).num_hidden_layers)
        self.scheduler = Scheduler(BlockManager(blocks, BLOCK), rows)
        self._runner = Runner(self.model, KvCache(blocks, BLOCK, layers))

    def _affordable(self) -> int:
        return affordable_tokens(self.model, self.memory) // BLOCK * BLOCK

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
        from covey.rollout.embedded.graphs import STEPS, GraphDecoder

        scheduler = self.scheduler
        steps = min(STEPS, max(r.left for r in scheduler.running))
        if any(truncates(r.sampling) for r in scheduler.running):
            steps = 1
        scheduler.reserve(steps)
        rows = list(scheduler.running)
        if self._decoder is None:
            blocks = scheduler.blocks.count(self.size + STEPS)  # steps beyond an answer's end have a place as well
            self._decoder = GraphDecoder(
                self.model, cache, rows=scheduler.max_rows, blocks=blocks, compiled=self.compiled
            )
        if steps == 1:
            return draw_next(rows, self._decoder.logits(rows))
        return list(zip(rows, *self._decoder.run(rows, steps), strict=True))

    def finish(self, request: Running) -> None:
        self.scheduler.finish(request)

    def forget(self) -> None:
        """Other weights: what the old ones computed is void, but for those whose answers it began."""
        self.scheduler.blocks.forget()
