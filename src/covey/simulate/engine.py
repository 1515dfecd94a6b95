"""One engine under a made-up clock: all sequences of its batch get their tokens at the same pace, which the size of the
batch decides. So one number says how far everybody has come, and the next to end is the top of a heap.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Answer:
    """One reply that is being decoded."""

    tokens: int
    prefill: float  # seconds of the engine before its first token
    whose: object  # the episode, for who is told of the end
    versions: dict[int, float] = field(default_factory=dict)  # tokens by the version of the weights that drew them
    since: float = 0.0  # where the engine was when this version began to draw it


class SimulatedEngine:
    def __init__(self, pace: Callable[[int], float], capacity: int) -> None:
        """`pace`: seconds of a decoding step by its sequences. `capacity`: sequences decoded together; others wait."""
        assert capacity > 0
        self.pace = pace
        self.capacity = capacity
        self.version = 0
        self.paused = False  # somebody else has the device
        self.draining = False  # answers end, none begin
        self.busy = 0.0  # seconds
        self.stamp = 0  # changes with every change of plan
        self._clock = 0.0
        self._done = 0.0  # tokens that a sequence would have which was there from the start
        self._stall = 0.0  # seconds of prefill before anybody gets a token
        self._active: list[tuple[float, int, Answer]] = []  # by where they end
        self._queue: deque[Answer] = deque()
        self._count = 0

    @property
    def load(self) -> int:
        return len(self._active) + len(self._queue)

    @property
    def drained(self) -> bool:
        return not self._active

    def add(self, answer: Answer, now: float) -> None:
        self.advance(now)
        self._queue.append(answer)
        self._admit()

    def advance(self, now: float) -> None:
        elapsed, self._clock = now - self._clock, now
        if self.paused or not self._active:
            return
        self.busy += elapsed
        stalled = min(self._stall, elapsed)
        self._stall -= stalled
        self._done += (elapsed - stalled) / self.pace(len(self._active))

    def next_end(self) -> float:
        """When the next answer ends, if nothing changes before."""
        if self.paused or not self._active:
            return math.inf
        left = max(0.0, self._active[0][0] - self._done)
        return self._clock + self._stall + left * self.pace(len(self._active))

    def pop_ended(self, now: float) -> Answer:
        """The answer whose end `next_end` said."""
        self.advance(now)
        end, _, answer = heapq.heappop(self._active)
        self._done = max(self._done, end)  # rounding
        self._draw(answer, end)
        self._admit()
        return answer

    def change(
        self, now: float, *, paused: bool | None = None, draining: bool | None = None, version: int | None = None
    ) -> None:
        self.advance(now)
        if version is not None:
            for _, _, answer in self._active:
                self._draw(answer, self._done)
            self.version = version
        self.paused = self.paused if paused is None else paused
        self.draining = self.draining if draining is None else draining
        self._admit()

    def _draw(self, answer: Answer, until: float) -> None:
        """What was drawn since the last change is of the weights of now."""
        answer.versions[self.version] = answer.versions.get(self.version, 0.0) + max(0.0, until - answer.since)
        answer.since = until

    def _admit(self) -> None:
        while self._queue and len(self._active) < self.capacity and not self.draining:
            answer = self._queue.popleft()
            self._stall += answer.prefill
            answer.since = self._done
            self._count += 1
            heapq.heappush(self._active, (self._done + answer.tokens, self._count, answer))
        self.stamp += 1
