"""The slots of the batch on a GPU: which request each one holds, and which edits bring the GPU up to date.

A request keeps its slot from step to step, so entering and leaving change single slots. Plain Python, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from covey.rollout.embedded.scheduler import RequestState


@dataclass(frozen=True)
class Edits:
    """Changes of the slots, to be made in this order."""

    moves: list[tuple[int, int]]  # a sequence goes from the first slot to the second, with its state
    changed: list[int]  # slots that get another request, or none
    grown: list[int]  # slots whose request has more blocks than the GPU knows


class Slots:
    def __init__(self, count: int) -> None:
        self.requests: list[RequestState | None] = [None] * count
        self._blocks: list[list[int]] = [
            [] for _ in range(count)
        ]  # of the requests: a request that enters again has another list
        self._known: list[int] = [0] * count  # blocks that the GPU knows of
        self._stale = False

    def used(self) -> list[RequestState | None]:
        """The slots up to the last one that holds a request."""
        last = max((slot for slot, request in enumerate(self.requests) if request is not None), default=-1)
        return self.requests[: last + 1]

    def forget(self) -> None:
        """The requests have moved on without the GPU: the next `arrange` sends all of them again."""
        self.requests = [None] * len(self.requests)
        self._stale = True

    def arrange(self, rows: Sequence[RequestState], size: Callable[[int], int]) -> Edits:
        """Give every request a slot below `size(len(rows))`, and free the slots of all others."""
        limit = size(len(rows))
        running = set(rows)
        changed = set(range(len(self.requests)) if self._stale else ())
        self._stale = False
        place: dict[RequestState, int] = {}
        for slot, request in enumerate(self.requests):
            if request is not None and request in running and request.blocks is self._blocks[slot]:
                place[request] = slot
            elif request is not None:
                self.requests[slot] = None
                changed.add(slot)
        free = (slot for slot in range(limit) if self.requests[slot] is None)
        moves: list[tuple[int, int]] = []
        for request, slot in place.items():
            if slot >= limit:
                target = next(free)
                moves.append((slot, target))
                changed.add(slot)
                changed.discard(target)
                self._hold(target, request, self._known[slot])
                self.requests[slot] = None
        for request in rows:
            if request not in place:
                target = next(free)
                changed.add(target)
                self._hold(target, request, 0)
        grown = [
            slot for slot, request in enumerate(self.requests) if request and len(request.blocks) > self._known[slot]
        ]
        for slot in grown:
            self._known[slot] = len(self._blocks[slot])
        return Edits(moves, sorted(changed), grown)

    def _hold(self, slot: int, request: RequestState, known: int) -> None:
        self.requests[slot], self._blocks[slot], self._known[slot] = request, request.blocks, known
