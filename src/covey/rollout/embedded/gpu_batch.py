"""The batch on a GPU: sequences in small blocks, several captured steps before the host looks."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from covey.memory import cache_tokens, grown
from covey.rollout.embedded.allocation import BlockManager
from covey.rollout.embedded.cache import KvCache
from covey.rollout.embedded.runner import Drawn, Runner, draw_next, truncates
from covey.rollout.embedded.scheduler import Running, Scheduler, refuse

if TYPE_CHECKING:
    from covey.rollout.embedded.graphs import Flight, GraphDecoder

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
        from covey.rollout.embedded.graphs import GraphDecoder

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
