"""Rows of the cache: by hand, and by simulation of a cache that remembers which tokens were written where."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from covey.rollout.embedded.allocation import MIN_DENSITY, MIN_SHARED, PrefixMatch, RowManager, common_prefix
from covey.rollout.embedded.runner import Runner
from covey.rollout.embedded.scheduler import PrefillGroup, RequestState, Scheduler
from covey.types import Sampling

Tokens = tuple[int, ...]


def leave_behind(manager: RowManager, tokens: Sequence[int]) -> int:
    """A sequence comes, fills its row and goes."""
    rows = manager.allocate(1)
    assert rows is not None
    manager.register(rows, tokens)
    manager.release(rows)
    return rows[0]


@pytest.mark.parametrize("seed", range(5))
def test_common_beginnings(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        a, b = (tuple(rng.choices((0, 1), weights=(9, 1), k=rng.randint(0, 12))) for _ in range(2))
        same = 0
        while same < min(len(a), len(b)) and a[same] == b[same]:
            same += 1
        assert common_prefix(a, b) == same


def test_an_episodes_next_turn_takes_its_row_over() -> None:
    manager = RowManager(4)
    first = leave_behind(manager, range(5))
    other = leave_behind(manager, (7, 8))
    assert manager.match(range(9)) == PrefixMatch([first], shared=5)
    assert manager.match((7, 8, 9)) == PrefixMatch([other], shared=2)
    assert manager.available == 2
    assert manager.match(range(9)) == PrefixMatch([], shared=0)  # it is held, and five tokens are not worth a copy


def test_the_last_token_is_never_found() -> None:
    manager = RowManager(2)
    row = leave_behind(manager, range(20))
    assert manager.match(range(21)) == PrefixMatch([row], shared=20)
    manager.release([row])
    assert manager.match(range(20)) == PrefixMatch([], shared=19, source=row)


def test_the_longer_of_two_rows_is_extended() -> None:
    manager = RowManager(4)
    for length in (12, 30, 20):
        leave_behind(manager, range(length))
    assert manager.match(range(40)) == PrefixMatch([1], shared=30)
    manager.release([1])
    assert manager.match(range(28)) == PrefixMatch([], shared=27, source=1)  # a longer beginning is worth a copy


def test_a_common_beginning_is_copied_from_a_row_that_is_held_as_well() -> None:
    manager = RowManager(4)
    held = manager.allocate(1)
    assert held is not None
    manager.register(held, range(20))
    assert manager.match([*range(15), 99, 98]) == PrefixMatch([], shared=15, source=held[0])
    assert manager.match([*range(MIN_SHARED), 99, 98]) == PrefixMatch([], shared=MIN_SHARED, source=held[0])
    assert manager.match([*range(MIN_SHARED - 1), 99, 98]) == PrefixMatch([], shared=0)


def test_a_conversation_that_diverges_leaves_the_row_for_its_continuation() -> None:
    manager = RowManager(3)
    row = leave_behind(manager, range(20))
    assert manager.match([*range(15), 99, 98]) == PrefixMatch([], shared=15, source=row)
    assert manager.match(range(30)) == PrefixMatch([row], shared=20)


def test_a_younger_row_is_copied_from_only_if_it_is_worth_waiting_for() -> None:
    """It may have come in the same call, and then it is not computed yet."""
    manager = RowManager(4)
    for tokens in ([*range(20), 90], [*range(25), 91], [*range(33), 92]):
        rows = manager.allocate(1)
        assert rows is not None
        manager.register(rows, tokens)
    assert manager.match([*range(26), 50, 0]) == PrefixMatch([], shared=20, source=0)
    assert manager.match([*range(26), 0]) == PrefixMatch([], shared=26, source=2)  # nothing is left to compute
    assert manager.match([*range(40), 0]) == PrefixMatch([], shared=33, source=2)


def test_empty_rows_go_first_and_then_the_least_recently_used() -> None:
    manager = RowManager(4)
    for start in (0, 100, 200):
        leave_behind(manager, range(start, start + 20))
    assert manager.match([*range(15), 0]).source == 0  # looked at: now the last to go
    assert [manager.allocate(1) for _ in range(5)] == [[3], [1], [2], [0], None]


def test_new_weights_make_everything_unfindable_and_lose_no_row() -> None:
    manager = RowManager(3)
    leave_behind(manager, range(20))
    held = manager.allocate(1)
    assert held is not None
    manager.register(held, range(50, 70))
    manager.flush()
    assert manager.available == 2
    assert manager.match(range(30)) == manager.match(range(50, 80)) == PrefixMatch([], shared=0)
    manager.register(held, range(50, 75))  # it ends later, and its beginning is of the old weights
    manager.release(held)
    assert manager.match(range(50, 80)) == PrefixMatch([], shared=0)
    assert manager.available == 3
    row = leave_behind(manager, range(50, 75))
    assert manager.match(range(50, 80)) == PrefixMatch([row], shared=25)


def test_held_rows_move_to_the_front_and_change_places_with_idle_ones() -> None:
    manager = RowManager(8)
    held = manager.allocate(8)
    assert held is not None
    for row in held:
        manager.register([row], range(10 * row, 10 * row + 9))
    manager.release([1, 2, 3])
    assert manager.compact() == {}  # five of eight
    manager.register([0], ())
    manager.release([0, 4])
    # 5, 6 and 7 are held; 0 is empty; what 1 and 2 keep is still worth something
    assert manager.compact() == {5: 0, 6: 1, 7: 2, 1: 6, 2: 7}
    assert manager.compact() == {}
    assert manager.match(range(10, 30)) == PrefixMatch([6], shared=9)
    assert manager.match(range(20, 40)) == PrefixMatch([7], shared=9)
    assert manager.match([*range(60, 69), 0]) == PrefixMatch([], shared=9, source=1)
    assert manager.allocate(1) == [5]
    manager.release([0, 1, 2])
    assert manager.match(range(50, 70)) == PrefixMatch([0], shared=9)


def test_rows_that_are_added_are_empty() -> None:
    manager = RowManager(1)
    assert manager.allocate(1) == [0]
    assert manager.allocate(1) is None
    manager.grow(3)
    assert manager.allocate(2) == [1, 2]


# -- with scheduler and runner ---------------------------------------------------------------------------------------


class Memory:
    """A cache of rows: position → all tokens up to that one, which is what keys and values depend on; with the weights
    that computed it."""

    def __init__(self) -> None:
        self.size = 1000
        self.rows: dict[int, list[Any]] = defaultdict(list)

    def copy(self, pairs: Sequence[tuple[int, int]], columns: int) -> None:
        content = [self.rows[source][:columns] for source, _ in pairs]
        for (_, target), found in zip(pairs, content, strict=True):
            self.rows[target] = list(found)

    def write(self, row: RequestState, position: int, weights: int) -> None:
        (place,) = row.blocks
        assert len(self.rows[place]) >= position, "the tokens before it are not there"
        self.rows[place][position:] = [(row.tokens[: position + 1], weights)]


class Simulation:
    """The scheduler, the rows and the runner's order of things; the model's part is to write to `Memory`."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.manager = RowManager(rng.randint(1, 3))
        self.scheduler = Scheduler(self.manager, max_rows=rng.randint(2, 7))
        self.memory = Memory()
        self.runner = Runner(None, self.memory)  # type: ignore[arg-type]
        self.runner._prefill = self.fill  # type: ignore[method-assign]
        self.weights = 0
        self.computed = self.needed = self.moves = 0
        self.length: dict[RequestState, int] = {}
        self.came_with: dict[RequestState, int] = {}  # the weights at hand when it entered
        self.ended: list[Tokens] = []

    def fill(self, rows: Sequence[RequestState], starts: Sequence[int], lengths: Sequence[int]) -> None:
        for row, start, length in zip(rows, starts, lengths, strict=True):
            for position in range(start, start + length):
                self.memory.write(row, position, self.weights)
            self.computed += length

    def arrive(self) -> None:
        rng = self.rng
        if self.ended and rng.random() < 0.5:  # a next turn
            prompt = (*rng.choice(self.ended), *rng.choices(range(9), k=rng.randint(1, 5)))
        else:
            prompt = (*range(rng.choice((0, 9, 14))), *rng.choices(range(9), k=rng.randint(1, 5)))
        for _ in range(rng.choice((1, 1, 3))):
            new = RequestState(prompt, Sampling(max_tokens=rng.randint(1, 12)))
            self.length[new] = rng.randint(1, new.sampling.max_tokens)
            self.scheduler.add(new)

    def check(self, each: RequestState) -> None:
        """Its tokens are there, computed by weights that were at hand since it came."""
        content = self.memory.rows[each.blocks[0]][: each.cached]
        assert len(content) == each.cached
        for position, (tokens, weights) in enumerate(content):
            assert tokens == each.tokens[: position + 1]
            assert weights >= self.came_with[each]

    def admit(self) -> list[PrefillGroup]:
        entries = self.scheduler.admit()
        self.runner.prefill(entries)
        for entry in entries:
            self.needed += entry.leader.cached * len(entry.members)
            self.came_with |= dict.fromkeys(entry.members, self.weights)
        return entries

    def step(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        self.admit()
        moved = self.manager.compact()
        self.moves += len(moved)
        self.memory.copy(list(moved.items()), columns=1000)
        for each in scheduler.running:
            each.blocks = [moved.get(row, row) for row in each.blocks]
        held = [row for each in scheduler.running for row in each.blocks]
        assert len(set(held)) == len(held) <= scheduler.max_rows
        assert len(held) >= MIN_DENSITY * (max(held) + 1)
        for each in list(scheduler.running):
            self.check(each)
            self.memory.write(each, each.cached, self.weights)
            each.ids.append(rng.randint(0, 8))
            each.logprobs.append(-1.0)
            each.cached += 1
            if len(each.ids) == self.length[each]:
                self.ended.append(each.tokens)
                scheduler.finish(each)
        assert self.manager.available + len(self.manager._held) == self.manager.rows
        if rng.random() < 0.05:
            self.weights += 1
            self.manager.flush()
        if rng.random() < 0.1 and self.manager.rows < scheduler.max_rows:
            self.manager.grow(self.manager.rows + 1)


@pytest.mark.parametrize("seed", range(60))
def test_every_request_reads_its_own_tokens_of_its_own_weights(seed: int) -> None:
    simulation = Simulation(seed)
    simulation.arrive()
    steps = 0
    while simulation.scheduler.busy:
        simulation.step()
        steps += 1
        assert steps < 3000, "stuck"
        if simulation.rng.random() < 0.4 and len(simulation.length) < 60:
            simulation.arrive()
    assert all(len(each.ids) == length for each, length in simulation.length.items())
    assert simulation.manager.available == simulation.manager.rows


def test_the_simulations_do_share_and_move() -> None:
    """Otherwise they would not show what they are for."""
    computed = needed = moves = 0
    for seed in range(20):
        simulation = Simulation(seed)
        for _ in range(12):
            simulation.arrive()
        while simulation.scheduler.busy:
            simulation.step()
        computed, needed = computed + simulation.computed, needed + simulation.needed
        moves += simulation.moves
    assert computed < 0.7 * needed
    assert moves > 10


def test_who_copies_from_a_row_that_comes_in_the_same_call_waits_for_it() -> None:
    simulation = Simulation(0)
    simulation.manager.grow(7)
    simulation.scheduler.max_rows = 7
    order: list[list[int]] = []
    fill = simulation.fill

    def noted(rows: Sequence[RequestState], starts: Sequence[int], lengths: Sequence[int]) -> None:
        order.append([requests.index(row) for row in rows])
        fill(rows, starts, lengths)

    simulation.runner._prefill = noted  # type: ignore[method-assign]
    prompts = [
        [*range(20), 0],
        [*range(50, 80), 0],
        [*range(20), 1, 2],
        [*range(50, 80), 1, 2, 3],
        [*range(20), 1, 1, 1],
    ]
    requests = [RequestState(tuple(prompt), Sampling(max_tokens=4)) for prompt in prompts]
    for request in requests:
        simulation.scheduler.add(request)
    entries = simulation.admit()
    assert [(entry.shared, entry.source) for entry in entries] == [(0, None), (0, None), (20, 0), (30, 1), (20, 0)]
    # The longest first; two lead, three continue from them together.
    assert order == [[1, 0], [3, 4, 2]]
    for request in requests:
        simulation.check(request)


def test_a_row_that_is_copied_from_may_be_given_to_the_next_in_the_same_call() -> None:
    """Two rows: the first request copies from an idle row, whose place the second then gets."""
    simulation = Simulation(0)
    simulation.manager = manager = RowManager(2)
    simulation.scheduler = scheduler = Scheduler(manager, max_rows=2)
    old = RequestState((*range(20), 5), Sampling(max_tokens=1))
    simulation.length[old] = 1
    scheduler.add(old)
    simulation.admit()
    simulation.memory.write(old, old.cached, 0)
    old.ids, old.logprobs, old.cached = [7], [-1.0], 21
    scheduler.finish(old)
    first, second = (RequestState(tuple(p), Sampling(max_tokens=4)) for p in ([*range(15), 1, 2], range(50, 60)))
    scheduler.add(first)
    scheduler.add(second)
    entries = simulation.admit()
    assert [entry.source for entry in entries] == [0, None]
    assert [first.blocks, second.blocks] == [[1], [0]]
    simulation.check(first)
    simulation.check(second)


def test_the_only_row_is_taken_over_from_where_two_conversations_part() -> None:
    simulation = Simulation(0)
    simulation.manager = manager = RowManager(1)
    simulation.scheduler = scheduler = Scheduler(manager, max_rows=1)
    leave_behind(manager, range(20))
    simulation.memory.rows[0] = [(tuple(range(n + 1)), 0) for n in range(20)]
    new = RequestState((*range(15), 1, 2), Sampling(max_tokens=4))
    scheduler.add(new)
    (entry,) = simulation.admit()
    assert (entry.shared, entry.source, new.blocks) == (15, None, [0])
    assert simulation.computed == 1
    simulation.check(new)
