"""The block manager: by hand, and by random operations beside a model of what the blocks contain."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from covey.rollout.embedded.allocation import BlockManager, PrefixMatch

Tokens = tuple[int, ...]


def leave_behind(manager: BlockManager, tokens: Tokens) -> list[int]:
    """A sequence comes, fills its blocks and goes."""
    blocks = manager.allocate(manager.count(len(tokens)))
    assert blocks is not None
    manager.register(blocks, tokens)
    manager.release(blocks)
    return blocks


def findable(manager: BlockManager, tokens: Tokens) -> list[int]:
    """The match, without changing the order of use more than a lookup does."""
    found = manager.match(tokens).blocks
    manager.release(found)
    return found


def test_tokens_fill_blocks_rounded_up() -> None:
    manager = BlockManager(blocks=4, size=3)
    assert [manager.count(n) for n in (0, 1, 3, 4, 6, 7)] == [0, 1, 1, 2, 2, 3]


def test_allocating_too_many_blocks_returns_none_and_takes_nothing() -> None:
    manager = BlockManager(blocks=4, size=2)
    assert manager.allocate(5) is None
    assert manager.available == 4
    held = manager.allocate(3)
    assert held is not None
    assert manager.allocate(2) is None
    assert manager.available == 1
    last = manager.allocate(1)
    assert last is not None
    assert sorted(held + last) == [0, 1, 2, 3]
    assert manager.allocate(0) == []


def test_a_block_is_given_out_again_only_when_its_last_holder_has_gone() -> None:
    manager = BlockManager(blocks=2, size=2)
    held = manager.allocate(2)
    assert held is not None
    manager.hold(held[:1])
    manager.release(held)
    assert manager.available == 1
    assert manager.allocate(1) == held[1:]
    manager.release(held[:1])
    assert manager.allocate(1) == held[:1]


def test_the_block_with_the_last_token_is_never_found() -> None:
    manager = BlockManager(blocks=4, size=2)
    blocks = leave_behind(manager, (1, 2, 3, 4))
    assert findable(manager, (1, 2, 3, 4, 5)) == blocks
    assert findable(manager, (1, 2, 3, 4)) == blocks[:1]
    assert findable(manager, (1, 2, 3)) == blocks[:1]
    assert findable(manager, (1, 2)) == []


def test_a_block_is_found_only_after_the_same_beginning() -> None:
    manager = BlockManager(blocks=8, size=2)
    leave_behind(manager, (1, 2, 3, 4))
    assert findable(manager, (3, 4, 9)) == []
    assert findable(manager, (9, 9, 3, 4, 9)) == []
    assert len(findable(manager, (1, 2, 9, 9, 9))) == 1


def test_a_partly_filled_block_is_taken_over_by_one_sequence_that_continues_it() -> None:
    manager = BlockManager(blocks=8, size=4)
    first, last = leave_behind(manager, (1, 2, 3, 4, 5, 6))
    match = manager.match((1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert match == PrefixMatch([first, last], 6)
    assert manager.match((1, 2, 3, 4, 5, 6, 9)) == PrefixMatch([first], 4)  # it has a holder now
    assert manager.match((1, 2, 3, 4, 5, 9)) == PrefixMatch([first], 4)  # its tokens do not continue it
    manager.release([first])
    manager.release([first])
    manager.release(match.blocks)  # unchanged: its request could not be admitted
    assert manager.match((1, 2, 3, 4, 5, 6, 7)) == match


def test_a_partly_filled_block_that_was_filled_is_found_as_a_full_one() -> None:
    manager = BlockManager(blocks=8, size=4)
    leave_behind(manager, (1, 2))
    (block,) = manager.match((1, 2, 3, 4, 5)).blocks
    manager.register([block], (1, 2, 3, 4))
    assert manager.match((1, 2, 3, 9)).blocks == []
    assert manager.match((1, 2, 3, 4, 9)) == PrefixMatch([block], 4)  # shared while it is held


def test_of_several_partly_filled_blocks_the_fullest_is_found() -> None:
    manager = BlockManager(blocks=8, size=4)
    (short,), (long,), (_,) = (leave_behind(manager, tokens) for tokens in ((1,), (1, 2), (1, 3)))
    assert manager.match((1, 2, 5)) == PrefixMatch([long], 2)
    assert manager.match((1, 2, 5)) == PrefixMatch([short], 1)
    assert manager.match((1, 2, 5)) == PrefixMatch([], 0)


def test_evicted_and_old_partly_filled_blocks_are_not_found() -> None:
    manager = BlockManager(blocks=2, size=4)
    leave_behind(manager, (1, 2))
    assert manager.allocate(2) is not None
    assert manager.match((1, 2, 3)).blocks == []
    manager = BlockManager(blocks=2, size=4)
    held = manager.allocate(1)
    leave_behind(manager, (1, 2))
    manager.flush()
    assert manager.match((1, 2, 3)).blocks == []
    assert held is not None
    manager.register(held, (5, 6))  # written by old weights
    manager.release(held)
    assert manager.match((5, 6, 7)).blocks == []
    assert manager.available == 2


def test_empty_blocks_go_before_remembered_ones_and_the_least_recently_used_of_those_first() -> None:
    manager = BlockManager(blocks=5, size=2)
    for tokens in ((1, 1), (2, 2), (3, 3)):
        leave_behind(manager, tokens)
    assert len(findable(manager, (1, 1, 0))) == 1  # used again: now the last to go
    empty = manager.allocate(2)
    assert empty is not None
    assert manager.available == 3
    gone = []
    for _ in range(3):
        assert manager.allocate(1) is not None
        left = [t for t in (1, 2, 3) if (t, t) in {key[1] for key in manager._block_of}]
        gone.append(({1, 2, 3} - set(left) - set(gone)).pop())
    assert gone == [2, 3, 1]


def test_beginnings_live_longer_than_ends() -> None:
    manager = BlockManager(blocks=4, size=2)
    tokens = (1, 2, 3, 4, 5, 6, 7, 8)
    blocks = leave_behind(manager, tokens)
    for left in (3, 2, 1, 0):
        assert manager.allocate(1) == [blocks[left]]
        assert manager.available == left
        assert findable(manager, (*tokens, 9)) == blocks[:left]


def test_new_weights_make_everything_unfindable_and_lose_no_block() -> None:
    manager = BlockManager(blocks=4, size=2)
    leave_behind(manager, (1, 2, 3, 4))
    held = manager.match((1, 2, 9)).blocks
    manager.flush()
    assert manager.match((1, 2, 3, 4, 5)).blocks == []
    assert manager.available == 3
    manager.release(held)
    assert manager.available == 4


def test_what_was_held_while_the_weights_changed_is_not_remembered_afterwards() -> None:
    """Its keys and values are of the old weights, and so is the beginning that its later blocks looked at."""
    manager = BlockManager(blocks=4, size=2)
    blocks = manager.allocate(1)
    assert blocks is not None
    manager.flush()
    more = manager.allocate(1)
    assert more is not None
    manager.register(blocks + more, (1, 2, 3, 4))
    manager.release(blocks + more)
    assert manager.match((1, 2, 3, 4, 5)).blocks == []
    fresh = leave_behind(manager, (1, 2, 3, 4))  # in the same blocks, with the new weights
    assert sorted(fresh) == sorted(blocks + more)
    assert findable(manager, (1, 2, 3, 4, 5)) == fresh


@pytest.mark.parametrize("seed", range(20))
def test_exactly_the_longest_remembered_chain_is_found(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 3)
    manager = BlockManager(blocks=1000, size=size)
    remembered: set[Tokens] = {()}
    partial: set[Tokens] = set()  # sequences whose last block is partly filled
    for _ in range(30):
        tokens = tuple(rng.choices((0, 1), k=rng.randint(1, 12)))
        full = 0
        while (full + 1) * size < len(tokens) and tokens[: (full + 1) * size] in remembered:
            full += 1
        ends = [len(t) for t in partial if len(t) // size == full and len(t) < len(tokens) and t == tokens[: len(t)]]
        found = manager.match(tokens)
        manager.release(found.blocks)
        assert found.shared == max([full * size, *ends])
        assert len(found.blocks) == full + bool(ends)
        leave_behind(manager, tokens)
        remembered |= {tokens[: n * size] for n in range(1, len(tokens) // size + 1)}
        if len(tokens) % size:
            partial.add(tokens)


@dataclass(eq=False)
class Alive:
    blocks: list[int]
    tokens: Tokens
    old: bool = False  # the weights have changed since it came


class Sequences:
    """Random sequences in one manager, and what they have written to every block."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.manager = BlockManager(blocks=self.rng.randint(3, 12), size=self.rng.randint(1, 4))
        self.alive: list[Alive] = []
        self.content: dict[int, Tokens | None] = {}  # block → all tokens up to its end; None: of old weights

    def write(self, sequence: Alive, since: int) -> None:
        for number in range(since, len(sequence.blocks)):
            tokens = sequence.tokens[: (number + 1) * self.manager.size]
            self.content[sequence.blocks[number]] = None if sequence.old else tokens

    def start(self) -> None:
        size, manager = self.manager.size, self.manager
        tokens = tuple(self.rng.choices((0, 1), k=self.rng.randint(1, 4 * size)))
        match = manager.match(tokens)
        found = match.blocks
        assert len(found) == manager.count(match.shared) and match.shared < len(tokens)
        assert match.source is None
        for number, block in enumerate(found):
            end, content = min((number + 1) * size, match.shared), self.content[block]
            assert content is not None and content[:end] == tokens[:end], "found what somebody else wrote"
        if match.shared % size:
            assert not any(found[-1] in sequence.blocks for sequence in self.alive), "two would write to it"
        self.check(also=found)
        need, before = manager.count(len(tokens)) - len(found), manager.available
        held = {block for sequence in self.alive for block in sequence.blocks} | set(found)
        fresh = manager.allocate(need)
        assert (fresh is None) == (need > before)
        if fresh is None:
            manager.release(found)
            return
        assert len(set(fresh)) == need
        assert not held & set(fresh), "given out while somebody holds it"
        sequence = Alive(found + fresh, tokens)
        self.write(sequence, since=match.shared // size)
        manager.register(sequence.blocks, tokens)
        self.alive.append(sequence)

    def grow(self) -> None:
        fresh = self.manager.allocate(1) if self.alive else None
        if fresh is None:
            return
        sequence = self.rng.choice(self.alive)
        since = len(sequence.tokens) // self.manager.size
        more = len(sequence.blocks) * self.manager.size - len(sequence.tokens) + 1
        sequence.tokens += tuple(self.rng.choices((0, 1), k=more))
        sequence.blocks += fresh
        self.write(sequence, since)

    def stop(self) -> None:
        if self.alive:
            sequence = self.alive.pop(self.rng.randrange(len(self.alive)))
            self.manager.register(sequence.blocks, sequence.tokens)
            self.manager.release(sequence.blocks)

    def forget(self) -> None:
        self.manager.flush()
        self.content = dict.fromkeys(self.content)
        for sequence in self.alive:
            sequence.old = True

    def check(self, also: Sequence[int] = ()) -> None:
        """free + idle + held = all, and the counts of holders are right."""
        manager = self.manager
        holders = Counter(block for sequence in self.alive for block in sequence.blocks) + Counter(also)
        assert manager._holders == holders
        free, idle = set(manager._free), set(manager._idle)
        assert len(free) == len(manager._free)
        assert not free & idle and not (free | idle) & set(holders)
        assert free | idle | set(holders) == set(range(manager.blocks))
        assert manager.available == len(free) + len(idle)


@pytest.mark.parametrize("seed", range(40))
def test_no_block_is_lost_doubled_or_found_with_other_tokens_in_it(seed: int) -> None:
    sequences = Sequences(seed)
    operations = [sequences.start, sequences.grow, sequences.stop, sequences.forget]
    for operation in sequences.rng.choices(operations, weights=(5, 5, 4, 0.3), k=300):
        operation()
        sequences.check()
    while sequences.alive:
        sequences.stop()
    assert sequences.manager.available == sequences.manager.blocks
