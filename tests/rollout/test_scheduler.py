"""The scheduler: by hand, and by simulation of a cache that remembers which tokens were written where."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence

import pytest

from covey.rollout.embedded.allocation import BlockManager
from covey.rollout.embedded.scheduler import PrefillGroup, RequestState, Scheduler, reject_too_long
from covey.types import Sampling

Tokens = tuple[int, ...]


def request(prompt: Sequence[int], max_tokens: int = 4) -> RequestState:
    return RequestState(tuple(prompt), Sampling(max_tokens=max_tokens))


def scheduler_of(blocks: int, size: int, max_rows: int, requests: Sequence[RequestState] = ()) -> Scheduler:
    scheduler = Scheduler(BlockManager(blocks, size), max_rows)
    for each in requests:
        scheduler.add(each)
    return scheduler


def sample(each: RequestState, *tokens: int) -> None:
    each.ids += tokens
    each.logprobs += [-1.0] * len(tokens)
    each.cached += len(tokens)


def test_waiting_requests_enter_in_their_order_while_there_are_rows() -> None:
    requests = [request([n, n, n]) for n in range(5)]
    scheduler = scheduler_of(100, 2, 3, requests)
    entries = scheduler.admit()
    assert [entry.members for entry in entries] == [(r,) for r in requests[:3]]
    assert scheduler.running == requests[:3]
    assert list(scheduler.waiting) == requests[3:]
    assert scheduler.admit() == []
    scheduler.finish(requests[1])
    assert [entry.leader for entry in scheduler.admit()] == [requests[3]]
    assert scheduler.running == [requests[0], requests[2], requests[3]]


def test_who_enters_has_blocks_for_its_tokens_and_is_fed_the_last_one() -> None:
    (one,) = requests = [request([7, 8, 9, 10, 11])]
    scheduler = scheduler_of(8, 2, 4, requests)
    (entry,) = scheduler.admit()
    assert entry.shared == 0
    assert (len(one.blocks), one.cached, one.next_token) == (3, 4, 11)
    sample(one, 42)
    assert (one.next_token, one.tokens, one.remaining) == (42, (7, 8, 9, 10, 11, 42), 3)


def test_tokens_between_two_positions() -> None:
    one = request([7, 8, 9])
    one.ids = [40, 41]
    for start in range(6):
        for end in range(start, 7):
            assert tuple(one.tokens_between(start, end)) == one.tokens[start:end]


def test_what_is_reserved_only_if_it_is_free() -> None:
    """Two requests with 2 of their 3 tokens in the cache, in 2 blocks of 2 each, and 4 more blocks."""
    one, other = requests = [request([1, 2, 3], max_tokens=6), request([4, 5, 6], max_tokens=9)]
    scheduler = scheduler_of(8, 2, 4, requests)
    scheduler.admit()

    def reserved(steps: int) -> tuple[bool, int, int, int]:
        return scheduler.reserve_if_free(steps), len(one.blocks), len(other.blocks), scheduler.blocks.available

    assert reserved(2) == (True, 2, 2, 4)  # 4 tokens fit
    assert reserved(3) == (True, 3, 3, 2)
    assert reserved(2) == (True, 3, 3, 2)  # what is there stays
    assert reserved(5) == (True, 4, 4, 0)  # the last ones
    assert reserved(6) == (True, 4, 4, 0)
    assert reserved(7) == (False, 4, 4, 0)  # the first has 6 left, the second wants a block and nobody goes
    assert scheduler.running == requests and not set(one.blocks) & set(other.blocks)


def test_a_full_cache_admits_all_requests_that_need_no_more_blocks() -> None:
    """As on a CPU, where a block is as long as a sequence: one block per row."""
    requests = [request([n, n], max_tokens=6) for n in range(4)]
    scheduler = scheduler_of(4, 8, 4, requests)
    assert len(scheduler.admit()) == 4
    scheduler.reserve(8)
    assert scheduler.running == requests


def test_a_block_is_kept_for_every_request_that_will_need_one() -> None:
    """Three runners of one block each that will grow: the fourth would take a block that they need."""
    requests = [request([n], max_tokens=4) for n in range(4)]
    scheduler = scheduler_of(6, 2, 4, requests)
    scheduler.admit()
    assert scheduler.running == requests[:3]


def test_a_group_enters_together_and_shares_full_blocks() -> None:
    prompt = [1, 2, 3, 4, 5]
    group = [request(prompt) for _ in range(3)]
    other = request([9, 9, 9])
    scheduler = scheduler_of(100, 2, 8, [group[0], other, *group[1:]])
    first, second = scheduler.admit()
    assert first.members == tuple(group)
    assert second.members == (other,)
    leader = group[0]
    assert len(leader.blocks) == 3
    for follower in group[1:]:
        assert follower.blocks[:2] == leader.blocks[:2]
        assert follower.cached == leader.cached == 4
        assert follower.next_token == 5
    assert len({each.blocks[2] for each in group}) == 3
    assert scheduler.blocks.available == 100 - 2 - 3 - 2
    for each in [*group, other]:
        scheduler.finish(each)
    assert scheduler.blocks.available == 100


def test_a_group_larger_than_the_batch_enters_as_rows_become_free() -> None:
    group = [request([1, 2, 3]) for _ in range(5)]
    scheduler = scheduler_of(100, 2, 2, group)
    (entry,) = scheduler.admit()
    assert entry.members == tuple(group[:2])
    sample(group[0], 7)
    scheduler.finish(group[0])
    (entry,) = scheduler.admit()
    assert entry == PrefillGroup((group[2],), shared=2)
    assert group[2].blocks[0] == group[1].blocks[0]


def test_a_group_larger_than_the_cache_enters_as_far_as_there_are_blocks() -> None:
    group = [request([1, 2, 3], max_tokens=1) for _ in range(5)]
    scheduler = scheduler_of(4, 2, 8, group)
    (entry,) = scheduler.admit()
    assert entry.members == tuple(group[:3])  # one shared block, and one of its own for each
    assert scheduler.blocks.available == 0


def test_the_next_turn_of_an_episode_continues_from_the_cache() -> None:
    first = request([1, 2, 3], max_tokens=3)
    scheduler = scheduler_of(100, 2, 8, [first])
    scheduler.admit()
    scheduler.reserve(3)
    sample(first, 4, 5, 6)
    scheduler.finish(first)  # 1 2 | 3 4 | 5 are cached; 6 never was fed
    second = request([1, 2, 3, 4, 5, 6, 7])
    scheduler.add(second)
    (entry,) = scheduler.admit()
    assert entry.shared == 5  # the last block is partly filled


def test_without_room_the_youngest_goes_back_to_the_front_and_keeps_its_tokens() -> None:
    old, young, waiting = request([1, 1], 6), request([2, 2], 6), request([3, 3], 6)
    scheduler = scheduler_of(4, 2, 2, [old, young, waiting])
    scheduler.admit()
    assert scheduler.running == [old, young]
    for token in range(2):
        scheduler.reserve(1)
        sample(old, 10 + token)
        sample(young, 20 + token)
    scheduler.reserve(1)  # each has 3 tokens in 2 blocks, 4 blocks in all
    for each, token in ((old, 12), (young, 22)):
        sample(each, token)
    scheduler.reserve(1)
    assert scheduler.running == [old]
    assert list(scheduler.waiting) == [young, waiting]
    assert young.ids == [20, 21, 22]
    assert (young.blocks, young.cached) == ([], 0)
    assert old.cached + 1 <= len(old.blocks) * 2
    for token in range(3):
        scheduler.reserve(1)
        sample(old, 13 + token)
    scheduler.finish(old)
    scheduler.admit()
    assert scheduler.running[0] is young
    assert (young.cached, young.next_token) == (4, 22)


def test_several_that_go_back_keep_their_order() -> None:
    requests = [request([n, n], max_tokens=7) for n in range(3)]
    scheduler = scheduler_of(6, 2, 3, requests)
    scheduler.admit()
    scheduler.reserve(7)
    assert scheduler.running == requests[:1]
    assert list(scheduler.waiting) == requests[1:]


def test_room_is_made_for_no_more_tokens_than_a_request_may_still_sample() -> None:
    short, long = request([1, 1, 1], max_tokens=1), request([2, 2, 2], max_tokens=8)
    scheduler = scheduler_of(50, 2, 2, [short, long])
    scheduler.admit()
    scheduler.reserve(8)
    assert len(short.blocks) == 2
    assert len(long.blocks) == 5  # 3 + 8 tokens, the last of which is never fed


def test_a_request_that_never_fits_is_rejected_with_the_settings_to_change() -> None:
    requests = [request(range(40), max_tokens=n) for n in (24, 25, 3, 26)]
    queue = deque(requests)
    assert reject_too_long(queue, 64) == [requests[1], requests[3]]
    assert list(queue) == [requests[0], requests[2]]
    assert requests[0].error is None
    expected = "a request of 40 + 25 tokens does not fit into a cache of 64: lower rollout.max_tokens, or raise"
    assert str(requests[1].error) == f"{expected} rollout.memory"


def test_abandoned_requests_do_not_enter() -> None:
    requests = [request([n]) for n in range(3)]
    scheduler = scheduler_of(10, 2, 3, requests)
    requests[0].cancelled = requests[2].cancelled = True
    scheduler.admit()
    assert scheduler.running == [requests[1]]
    assert not scheduler.waiting


class Simulation:
    """The cache as a table of (block, offset) → all tokens up to that one, which is what keys and values depend on."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.size, self.blocks = rng.randint(1, 3), rng.randint(5, 14)
        self.scheduler = scheduler_of(self.blocks, self.size, rng.randint(1, 6))
        self.memory: dict[tuple[int, int], Tokens] = {}
        self.length: dict[RequestState, int] = {}  # of its answer
        self.entered: list[RequestState] = []
        self.sent_back = 0

    def arrive(self, prompt: Tokens) -> None:
        most = self.blocks * self.size - len(prompt)
        new = RequestState(prompt, Sampling(max_tokens=self.rng.randint(1, min(most, 24))))
        self.length[new] = self.rng.randint(1, new.sampling.max_tokens)
        self.scheduler.add(new)

    def prompt(self) -> Tokens:
        most = min(self.blocks * self.size - 1, 10)
        return tuple(self.rng.choices((0, 1), weights=(4, 1), k=self.rng.randint(1, most)))

    def write(self, each: RequestState, position: int) -> None:
        self.memory[each.blocks[position // self.size], position % self.size] = each.tokens[: position + 1]

    def check(self, each: RequestState, until: int) -> None:
        for position in range(until):
            found = self.memory[each.blocks[position // self.size], position % self.size]
            assert found == each.tokens[: position + 1]

    def prefill(self, entries: Sequence[PrefillGroup]) -> None:
        for entry in entries:
            leader = entry.leader
            self.check(leader, until=entry.shared)
            for position in range(entry.shared, leader.cached):
                self.write(leader, position)
            full = leader.cached // self.size
            for follower in entry.members[1:]:
                for source, target in zip(leader.blocks[full:], follower.blocks[full:], strict=True):
                    for offset in range(self.size):
                        self.memory[target, offset] = self.memory.get((source, offset), ())
            self.entered += [each for each in entry.members if each not in self.entered]

    def step(self) -> None:
        scheduler = self.scheduler
        self.prefill(scheduler.admit())
        assert len(scheduler.running) <= scheduler.max_rows
        before = len(scheduler.running)
        assert before, "nobody runs although somebody waits"
        steps = self.rng.choice((1, 1, 3))
        scheduler.reserve(steps)
        self.sent_back += before - len(scheduler.running)
        assert scheduler.running, "the oldest can always go on"
        for each in list(scheduler.running):
            for _ in range(min(steps, self.length[each] - len(each.ids))):
                block = each.blocks[each.cached // self.size]
                assert not any(block in other.blocks for other in scheduler.running if other is not each)
                self.write(each, each.cached)
                self.check(each, until=each.cached + 1)
                sample(each, self.rng.randint(0, 1))
            if len(each.ids) == self.length[each]:
                scheduler.finish(each)
        held = {block for each in scheduler.running for block in each.blocks}
        assert scheduler.blocks.available + len(held) == self.blocks

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)


@pytest.mark.parametrize("seed", range(60))
def test_every_request_keeps_its_own_tokens_in_any_cache(seed: int) -> None:
    simulation = Simulation(seed)
    for _ in range(simulation.rng.randint(1, 6)):
        prompt = simulation.prompt()
        for _ in range(simulation.rng.randint(1, 4)):
            simulation.arrive(prompt)
    steps = 0
    while simulation.busy:
        simulation.step()
        steps += 1
        assert steps < 3000, "stuck"
        if simulation.rng.random() < 0.1 and len(simulation.length) < 30:
            simulation.arrive(simulation.prompt())
    assert all(len(each.ids) == length for each, length in simulation.length.items())
    assert simulation.scheduler.blocks.available == simulation.blocks


def test_the_simulations_do_run_out_of_blocks() -> None:
    """Otherwise they would not show what they are for."""
    sent_back = 0
    for seed in range(20):
        simulation = Simulation(seed)
        for _ in range(8):
            simulation.arrive(simulation.prompt())
        while simulation.busy:
            simulation.step()
        sent_back += simulation.sent_back
    assert sent_back > 10


@pytest.mark.parametrize("seed", range(20))
def test_requests_enter_in_order(seed: int) -> None:
    simulation = Simulation(seed)
    for number in range(8):
        simulation.arrive((number, *simulation.prompt()[:3]))
    while simulation.busy:
        simulation.step()
    assert simulation.entered == list(simulation.length)


def test_new_weights_send_back_only_requests_that_have_drawn_nothing() -> None:
    requests = [request([n, n, n], max_tokens=4) for n in range(4)]
    scheduler = scheduler_of(100, 2, 3, requests)
    scheduler.admit()
    sample(requests[1], 7)
    scheduler.blocks.flush()
    scheduler.preempt_prefills()
    assert scheduler.running == [requests[1]]
    assert list(scheduler.waiting) == [requests[0], requests[2], requests[3]]
    assert [entry.shared for entry in scheduler.admit()] == [0, 0]  # old blocks are not found again


@pytest.mark.parametrize("logprobs", [[], [-1.0, math.nan], [-math.inf]])
def test_what_may_be_non_finite_is_not_found_again(logprobs: list[float]) -> None:
    first, second = request([1, 2, 3, 4, 5]), request([1, 2, 3, 4, 6])
    scheduler = scheduler_of(100, 2, 1, [first, second])
    scheduler.admit()
    sample(first, *range(len(logprobs)))
    first.logprobs = logprobs
    scheduler.finish(first)
    (entry,) = scheduler.admit()
    assert entry.shared == 0
    assert scheduler.blocks.available == 100 - len(second.blocks)
