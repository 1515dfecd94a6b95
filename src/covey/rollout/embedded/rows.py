"""Which row of the key-value cache holds which tokens, where a sequence lies in one row (a CPU's way). Plain Python.

A row that nobody holds keeps its tokens until its place is needed, the least recently used first. Who goes on from all
of them (an episode's next turn) takes the row over; who begins like any row, held or not, copies that beginning.
New weights make all of them worthless.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from covey.rollout.embedded.blocks import Found

WORTH_SHARING = 8  # tokens that two sequences must begin with for a copy, and for waiting until they are computed
DENSE = 0.5  # of the rows up to the last that is held


@dataclass
class RowManager:
    """Of the same use as a BlockManager, with one block for every sequence."""

    rows: int = 0
    _free: list[int] = field(default_factory=list, init=False)
    _held: set[int] = field(default_factory=set, init=False)
    _tokens: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False)  # row → what it holds, oldest first
    _idle: OrderedDict[int, None] = field(default_factory=OrderedDict, init=False)  # held by nobody, findable
    _stale: set[int] = field(default_factory=set, init=False)  # held since before the weights changed

    def __post_init__(self) -> None:
        self._free = list(range(self.rows))  # a heap: the lowest first

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    def count(self, tokens: int) -> int:
        return 1

    def full(self, tokens: int) -> int:
        """A row has one holder, who writes to it."""
        return 0

    def grow(self, rows: int) -> None:
        for row in range(self.rows, rows):
            heapq.heappush(self._free, row)
        self.rows = rows

    def match(self, tokens: Sequence[int]) -> Found:
        """The row to go on in, or the one to copy from: an older one, unless a younger, which may only be about to be
        computed, has much more, or all. The last token is never found: it is what the model is fed first."""
        wanted = tuple(tokens[:-1])
        own, source, shared = None, None, WORTH_SHARING - 1
        for row, known in self._tokens.items():
            same = common(known, wanted)
            if row in self._idle and same == len(known) > (0 if own is None else len(self._tokens[own])):
                own = row
            if same >= shared + (1 if source is None or same == len(wanted) else WORTH_SHARING):
                source, shared = row, same
        if own is not None and (source is None or len(self._tokens[own]) >= shared):
            self.hold([own])
            return Found([own], len(self._tokens[own]))
        if source is None:
            return Found([], 0)
        if source in self._idle:
            self._idle.move_to_end(source)
        return Found([], shared, source)

    def allocate(self, count: int) -> list[int] | None:
        if count > self.available:
            return None
        taken = [heapq.heappop(self._free) if self._free else self._evict() for _ in range(count)]
        self._held.update(taken)
        return taken

    def hold(self, rows: Sequence[int]) -> None:
        for row in rows:
            assert row not in self._held, "a row has one holder"
            self._held.add(row)
            self._idle.pop(row, None)

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._held.remove(row)
            self._stale.discard(row)
            if row in self._tokens:
                self._idle[row] = None
            else:
                heapq.heappush(self._free, row)

    def remember(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """These tokens are in the row (or about to be), and can be found. What old weights computed cannot."""
        for row in rows:
            self._tokens.pop(row, None)
            if row not in self._stale and tokens:
                self._tokens[row] = tuple(tokens)

    def discard(self, rows: Sequence[int]) -> None:
        """What these hold must not be found again."""
        for row in rows:
            self._tokens.pop(row, None)

    def forget(self) -> None:
        """Other weights: what was computed with the old ones must not be found."""
        self._tokens.clear()
        self._stale = set(self._held)
        for row in self._idle:
            heapq.heappush(self._free, row)
        self._idle.clear()

    def compact(self) -> dict[int, int]:
        """Decoding reads all rows up to the last that is held. Where too few of them are, the held ones move to the
        front, and change places with what others left there: row → row, of all whose content moves."""
        count = len(self._held)
        if not count or count >= DENSE * (max(self._held) + 1):
            return {}
        last = sorted(row for row in self._held if row >= count)
        gaps = [row for row in range(count) if row not in self._held]
        moved = dict(zip(last, gaps, strict=True)) | dict(zip(gaps, last, strict=True))
        content = {row: place for row, place in moved.items() if row in self._held or row in self._idle}
        self._free = [moved.get(row, row) for row in self._free]
        heapq.heapify(self._free)
        self._held = {moved.get(row, row) for row in self._held}
        self._stale = {moved.get(row, row) for row in self._stale}
        self._tokens = {moved.get(row, row): tokens for row, tokens in self._tokens.items()}
        self._idle = OrderedDict((moved.get(row, row), None) for row in self._idle)
        return content

    def _evict(self) -> int:
        row, _ = self._idle.popitem(last=False)
        del self._tokens[row]
        return row


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
