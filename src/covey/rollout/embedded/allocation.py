"""Allocation of the key-value cache and prefix caching: which block or row holds which tokens. Plain Python, no torch.

    BlockManager   blocks of a fixed size, as on a GPU: a sequence holds a list of blocks, and sequences share full ones
    RowManager     one row for each sequence, as on a CPU: a row has one holder

A released block or row can be reused as a cached prefix until it is evicted, the least recently used first. Flushing
drops all cached prefixes: new weights make them invalid.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

Key = tuple[object, tuple[int, ...]]  # the block before it, and its tokens


@dataclass(frozen=True)
class PrefixMatch:
    """The cached prefix of a sequence: its first `shared` tokens are in `blocks`, which it now holds, or in `source`,
    from which they must be copied."""

    blocks: list[int]
    shared: int
    source: int | None = None


@dataclass
class BlockManager:
    """Blocks of `size` tokens. A full block is identified by all tokens up to its end, so sequences that begin with the
    same tokens share it: the prompt of a group, a system prompt, the earlier turns of an episode. A partly filled block
    has one holder; once that is gone, the first sequence that continues its tokens takes it over."""

    blocks: int
    size: int
    _free: list[int] = field(init=False)
    _holders: dict[int, int] = field(default_factory=dict, init=False)  # block → how many sequences hold it
    _key_of: dict[int, Key] = field(default_factory=dict, init=False)
    _block_of: dict[Key, int] = field(default_factory=dict, init=False)
    _partial: dict[int, Key] = field(default_factory=dict, init=False)  # partly filled block → its key
    _partials: dict[Key, set[int]] = field(default_factory=dict, init=False)  # by the block before and the first token
    _idle: OrderedDict[int, None] = field(default_factory=OrderedDict, init=False)  # cached, without a holder
    _stale: set[int] = field(default_factory=set, init=False)  # computed by old weights and still held

    def __post_init__(self) -> None:
        self._free = list(range(self.blocks))  # a heap: the lowest first

    @property
    def available(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free) + len(self._idle)

    def count(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.size)

    def full(self, tokens: int) -> int:
        """Blocks that this many tokens fill completely: these can be shared."""
        return tokens // self.size

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        """Hold the cached blocks that these tokens begin with. The last token is never part of the match: the model
        must be fed at least one."""
        blocks: list[int] = []
        before: object = None
        for key in self._keys(tokens, (len(tokens) - 1) // self.size):
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
            before = hash(key)
        shared = len(blocks) * self.size
        if (partial := self._free_partial(before, tokens[shared:-1])) is not None:
            blocks.append(partial)
            shared += len(self._partial[partial][1])
        self.hold(blocks)
        return PrefixMatch(blocks, shared)

    def _free_partial(self, before: object, tokens: Sequence[int]) -> int | None:
        """The partly filled block without a holder that has the most of these tokens."""
        best, length = None, 0
        for block in self._partials.get((before, tuple(tokens[:1])), ()):
            held = self._partial[block][1]
            if block in self._idle and len(held) > length and held == tuple(tokens[: len(held)]):
                best, length = block, len(held)
        return best

    def allocate(self, count: int) -> list[int] | None:
        """`count` empty blocks, or None if there are too few."""
        if count > self.available:
            return None
        allocated = [heapq.heappop(self._free) if self._free else self._evict() for _ in range(count)]
        for block in allocated:
            self._holders[block] = 1
        return allocated

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a holder to each of these blocks."""
        for block in blocks:
            self._holders[block] = self._holders.get(block, 0) + 1
            self._idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a holder from each of these blocks. The last block becomes the first to be evicted, so that prefixes
        live longer."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            self._stale.discard(block)
            if block in self._key_of or block in self._partial:
                self._idle[block] = None
            else:
                heapq.heappush(self._free, block)

    def register(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """Cache the blocks of a sequence that begins with these tokens, up to the first one that old weights computed:
        later blocks depend on it."""
        before: object = None
        full = self.full(len(tokens))
        for block, key in zip(blocks, self._keys(tokens, full), strict=False):
            if block in self._stale:
                return
            if key not in self._block_of and block not in self._key_of:
                self._forget_partial(block)
                self._block_of[key] = block
                self._key_of[block] = key
            before = hash(key)
        rest = tuple(tokens[full * self.size :])
        if rest and full < len(blocks) and blocks[full] not in self._stale:
            self._forget_partial(blocks[full])
            self._partial[blocks[full]] = (before, rest)
            self._partials.setdefault((before, rest[:1]), set()).add(blocks[full])

    def unregister(self, blocks: Sequence[int]) -> None:
        """Remove these from the cached prefixes."""
        for block in blocks:
            self._forget_partial(block)
            if (key := self._key_of.pop(block, None)) is not None:
                del self._block_of[key]

    def _forget_partial(self, block: int) -> None:
        if block in self._partial:
            before, tokens = self._partial.pop(block)
            alike = self._partials[before, tokens[:1]]
            alike.remove(block)
            if not alike:
                del self._partials[before, tokens[:1]]

    def flush(self) -> None:
        """Drop all cached prefixes: the weights have changed."""
        for index in (self._block_of, self._key_of, self._partial, self._partials):
            index.clear()
        self._stale = set(self._holders)
        for block in self._idle:
            heapq.heappush(self._free, block)
        self._idle.clear()

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self.unregister([block])
        return block

    def _keys(self, tokens: Sequence[int], count: int) -> list[Key]:
        keys: list[Key] = []
        before: object = None
        for number in range(count):
            key = (before, tuple(tokens[number * self.size : (number + 1) * self.size]))
            keys.append(key)
            before = hash(key)
        return keys


# -- Rows ------------------------------------------------------------------------------------------------------------

MIN_SHARED = 8  # tokens: a shorter common prefix is neither copied nor waited for
MIN_DENSITY = 0.5  # share of held rows among the rows up to the last held one


@dataclass
class RowManager:
    """One row per sequence, behind the interface of `BlockManager`. A sequence that extends a released row (the next
    turn of an episode) takes over the row; one that only shares a prefix with a row, held or not, copies the prefix."""

    rows: int = 0
    _free: list[int] = field(default_factory=list, init=False)
    _held: set[int] = field(default_factory=set, init=False)
    _tokens: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False)  # row → its tokens, the oldest first
    _idle: OrderedDict[int, None] = field(default_factory=OrderedDict, init=False)  # cached, without a holder
    _stale: set[int] = field(default_factory=set, init=False)  # computed by old weights and still held

    def __post_init__(self) -> None:
        self._free = list(range(self.rows))  # a heap: the lowest first

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    def count(self, tokens: int) -> int:
        return 1

    def full(self, tokens: int) -> int:
        """Rows are never shared: the holder writes to its row."""
        return 0

    def grow(self, rows: int) -> None:
        for row in range(self.rows, rows):
            heapq.heappush(self._free, row)
        self.rows = rows

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        """The row to extend, or the row to copy from. Older rows are preferred: a younger one may not be computed yet,
        so it must share much more, or everything. The last token is never part of the match."""
        prefix = tuple(tokens[:-1])
        own, source, shared = None, None, MIN_SHARED - 1
        for row, known in self._tokens.items():
            same = common_prefix(known, prefix)
            if row in self._idle and same == len(known) > (0 if own is None else len(self._tokens[own])):
                own = row
            if same >= shared + (1 if source is None or same == len(prefix) else MIN_SHARED):
                source, shared = row, same
        if own is not None and (source is None or len(self._tokens[own]) >= shared):
            self.hold([own])
            return PrefixMatch([own], len(self._tokens[own]))
        if source is None:
            return PrefixMatch([], 0)
        if source in self._idle:
            self._idle.move_to_end(source)
        return PrefixMatch([], shared, source)

    def allocate(self, count: int) -> list[int] | None:
        if count > self.available:
            return None
        allocated = [heapq.heappop(self._free) if self._free else self._evict() for _ in range(count)]
        self._held.update(allocated)
        return allocated

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

    def register(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Cache the tokens that are in the row, or about to be, unless old weights computed them."""
        for row in rows:
            self._tokens.pop(row, None)
            if row not in self._stale and tokens:
                self._tokens[row] = tuple(tokens)

    def unregister(self, rows: Sequence[int]) -> None:
        """Remove these from the cached prefixes."""
        for row in rows:
            self._tokens.pop(row, None)

    def flush(self) -> None:
        """Drop all cached prefixes: the weights have changed."""
        self._tokens.clear()
        self._stale = set(self._held)
        for row in self._idle:
            heapq.heappush(self._free, row)
        self._idle.clear()

    def compact(self) -> dict[int, int]:
        """Decoding reads all rows up to the last held one. If too few of them are held, swap the held rows to the
        front. Returns row → new row for all content that moves."""
        count = len(self._held)
        if not count or count >= MIN_DENSITY * (max(self._held) + 1):
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


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
