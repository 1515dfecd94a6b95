"""The batch on a CPU: every sequence has a row of the cache to itself."""

from __future__ import annotations

from collections import deque
from typing import Any

from covey.rollout.embedded.cache import RowCache
from covey.rollout.embedded.linear import WORTH_PACKING, PackedLinears
from covey.rollout.embedded.memory import affordable_tokens, grown
from covey.rollout.embedded.rows import RowManager
from covey.rollout.embedded.runner import Runner
from covey.rollout.embedded.sampling import Drawn, draw_next
from covey.rollout.embedded.scheduler import Running, Scheduler, refuse

ROUND = 64  # tokens


class SlottedBatch:
    """The cache grows where it is, with whoever is in it: to as many rows as there are requests at a time (at most
    `max_rows`), each as long as the longest of them could become."""

    def __init__(self, model: Any, *, max_rows: int, longest: int | None, memory: float) -> None:
        self.max_rows = max_rows
        self.longest = longest
        self.room = affordable_tokens(model, memory)
        self.rows = RowManager()
        self.scheduler = Scheduler(self.rows, max_rows)
        self.cache = RowCache()
        self.runner = Runner(model, self.cache)
        self.linears = PackedLinears(model)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def enter(self, queue: deque[Running]) -> list[Running]:
        """Everybody waits with the scheduler, and who can enter does. Who was refused."""
        refused = refuse(queue, self.room)
        while queue:
            self.scheduler.add(queue.popleft())
        self._grow()
        with self.linears.used():
            self.runner.prefill(self.scheduler.admit())
        return refused

    def _grow(self) -> None:
        waiting, running = self.scheduler.waiting, self.scheduler.running
        rows = grown(self.cache.rows, min(self.max_rows, len(waiting) + len(running)), self.max_rows)
        longest = max((request.longest for request in waiting), default=0)
        size = grown(self.cache.size, longest, self.longest, ROUND)
        if (rows, size) != (self.cache.rows, self.cache.size):
            self.rows.grow(rows)
            self.cache.grow(rows, size)

    def sample(self) -> Drawn:
        """One token for everybody."""
        self._compact()
        running = sorted(self.scheduler.running, key=lambda request: request.blocks[0])
        if not running:
            return []
        if max(request.left for request in running) >= WORTH_PACKING:
            self.linears.pack()
        with self.linears.used():
            logits_BV = self.runner.decode(running)
        return draw_next(running, logits_BV)

    def _compact(self) -> None:
        moved = self.rows.compact()
        for request in self.scheduler.running:
            request.blocks = [moved.get(row, row) for row in request.blocks]
        self.cache.copy(list(moved.items()), columns=self.cache.size)

    def finish(self, request: Running) -> None:
        (row,), sound = request.blocks, request.sound
        self.scheduler.finish(request)
        if not sound:
            self.cache.clear(row)  # decoding reads masked places too

    def forget(self) -> None:
        """Other weights: what the old ones computed is void, but for those whose answers it began."""
        self.rows.forget()
        self.linears.drop()
