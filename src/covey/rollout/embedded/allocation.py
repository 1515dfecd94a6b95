"""Which block of the key-value cache holds which tokens. Plain Python: no torch.

A sequence owns a list of blocks of `size` tokens each. A full block is known by the tokens up to its end, so a sequence
that begins with the same tokens takes it over instead of computing it again: the prompt of a group, a system prompt, an
episode's earlier turns. A block that nobody holds stays findable until its place is needed, the least recently used
first. New weights make all of them worthless.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

Key = tuple[object, tuple[int, ...]]  # the block before it, and its tokens


@dataclass(frozen=True)
class Found:
    """What of a sequence is in the cache: its first `shared` tokens, in blocks that it now holds, or (`source`) in one
    that it must copy them from."""

    blocks: list[int]
    shared: int
    source: int | None = None


@dataclass
class BlockManager:
    blocks: int
    size: int
    _free: list[int] = field(init=False)
    _holders: dict[int, int] = field(default_factory=dict, init=False)  # block → how many sequences hold it
    _key_of: dict[int, Key] = field(default_factory=dict, init=False)
    _found: dict[Key, int] = field(default_factory=dict, init=False)
    _idle: OrderedDict[int, None] = field(default_factory=OrderedDict, init=False)  # held by nobody, findable
    _stale: set[int] = field(default_factory=set, init=False)  # held since before the weights changed

    def __post_init__(self) -> None:
        self._free = list(range(self.blocks))  # a heap: the lowest first

    @property
    def available(self) -> int:
        """Blocks that a sequence could get now."""
        return len(self._free) + len(self._idle)

    def count(self, tokens: int) -> int:
        """Blocks that so many tokens fill."""
        return -(-tokens // self.size)

    def full(self, tokens: int) -> int:
        """Blocks that so many tokens leave no room in: these can be shared."""
        return tokens // self.size

    def match(self, tokens: Sequence[int]) -> Found:
        """Take over the full blocks that these tokens begin with. The last token is never among them: it is what the
        model is fed first."""
        found: list[int] = []
        for key in self._keys(tokens, (len(tokens) - 1) // self.size):
            block = self._found.get(key)
            if block is None:
                break
            found.append(block)
        self.hold(found)
        return Found(found, len(found) * self.size)

    def allocate(self, count: int) -> list[int] | None:
        """So many empty blocks, or None if there are not enough."""
        if count > self.available:
            return None
        taken = [heapq.heappop(self._free) if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """One more sequence has these."""
        for block in blocks:
            self._holders[block] = self._holders.get(block, 0) + 1
            self._idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """A sequence has done with these. The last is idle longest, so that beginnings live longer than ends."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            self._stale.discard(block)
            if block in self._key_of:
                self._idle[block] = None
            else:
                heapq.heappush(self._free, block)

    def remember(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """The full blocks of a sequence whose first tokens these are can be found from now on. Old weights' cannot, nor
        what was computed after looking at them."""
        for block, key in zip(blocks, self._keys(tokens, len(tokens) // self.size), strict=False):
            if block in self._stale:
                return
            if key not in self._found and block not in self._key_of:
                self._found[key] = block
                self._key_of[block] = key

    def discard(self, blocks: Sequence[int]) -> None:
        """What these hold must not be found again."""
        for block in blocks:
            if (key := self._key_of.pop(block, None)) is not None:
                del self._found[key]

    def forget(self) -> None:
        """Other weights: what was computed with the old ones must not be found."""
        self._found.clear()
        self._key_of.clear()
        self._stale = set(self._holders)
        for block in self._idle:
            heapq.heappush(self._free, block)
        self._idle.clear()

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._found[self._key_of.pop(block)]
        return block

    def _keys(self, tokens: Sequence[int], count: int) -> list[Key]:
        keys: list[Key] = []
        before: object = None
        for number in range(count):
            key = (before, tuple(tokens[number * self.size : (number + 1) * self.size]))
            keys.append(key)
            before = hash(key)
        return keys


# -- Which row of the key-value cache holds which tokens, where a sequence lies in one row (a CPU's way). Plain Python--
# A row that nobody holds keeps its tokens until its place is needed, the least recently used first. Who goes on from
# all of them (an episode's next turn) takes the row over; who begins like any row, held or not, copies that beginning.
# New weights make all of them worthless.

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
