"""Asynchronous rollout: the window under a simulated clock, the replay buffer, and the background source."""

from __future__ import annotations

import asyncio
import heapq
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from covey.agents.resolve import FunctionAgent
from covey.errors import InputError, RunFailed
from covey.rollout.asynchronous import (
    BackgroundSource,
    ReplayBuffer,
    ReplayedGroup,
    Window,
    fresh_groups,
    group_from_json,
    group_to_json,
    oldest_version,
)
from covey.rollout.collector import Refill
from covey.types import Collected, Episode, Group, Sampling, StopReason, Task, Turn
from tests.rollout.test_collector import TASKS, collector, parity

# -- Window ------------------------------------------------------------------------------------------------------------


Duration = Callable[[random.Random, int], float]


def simulate(
    steps: int, size: int, lead: int, duration: Duration, seed: int = 0, every: int = 1
) -> list[tuple[int, int, int, float]]:
    """(ticket, began, trained at, duration) of a whole run: learning takes 1, a group as long as `duration` says;
    engines get the weights of every `every`-th step."""
    rng, window = random.Random(seed), Window(size, lead, end=steps)
    clock, running, found = 0.0, [], []
    lasts: dict[int, float] = {}
    for step in range(steps):
        window.advance(step, step - step % every)
        for ticket in window.begin():
            lasts[ticket.number] = duration(rng, ticket.number)
            heapq.heappush(running, (clock + lasts[ticket.number], ticket.number))
        while True:
            while running and running[0][0] <= clock:
                window.finish(heapq.heappop(running)[1])
            if (batch := window.take()) is not None:
                break
            clock = running[0][0]  # wait for the next one: there is one, or nobody could ever be taken
        found += [(t.number, t.began, step, lasts[t.number]) for t in batch]
        clock += 1.0
    assert not running and not window.pending and not window.complete
    return found


DURATIONS: dict[str, Duration] = {
    "equal": lambda rng, n: 1.0,
    "heavy-tailed": lambda rng, n: rng.paretovariate(0.8),
    "every seventh takes forever": lambda rng, n: 200.0 if n % 7 == 0 else 0.1,
    "the first of a step is the last": lambda rng, n: 50.0 if n % 4 == 0 else 0.0,
    "ever longer": lambda rng, n: n / 50,
    "ever shorter": lambda rng, n: max(0.0, 100 - n / 10),
}


@pytest.mark.parametrize("lead", [0, 1, 2, 5])
@pytest.mark.parametrize("name", DURATIONS)
def test_staleness_is_at_most_the_lead_and_every_ticket_is_trained_on_once(name: str, lead: int) -> None:
    found = simulate(1500, 4, lead, DURATIONS[name])
    assert sorted(number for number, *_ in found) == list(range(1500 * 4))
    assert max(at - began for _, began, at, _ in found) <= lead


@pytest.mark.parametrize(("lead", "every"), [(1, 2), (3, 2), (3, 4), (6, 4)])
@pytest.mark.parametrize("name", DURATIONS)
def test_the_same_if_engines_get_weights_less_often(name: str, lead: int, every: int) -> None:
    found = simulate(600, 4, lead, DURATIONS[name], every=every)
    assert sorted(number for number, *_ in found) == list(range(600 * 4))
    assert max(at - began for _, began, at, _ in found) <= lead
    assert all(began % every == 0 for _, began, _, _ in found)


def test_ten_thousand_steps() -> None:
    found = simulate(10_000, 3, 3, DURATIONS["heavy-tailed"], seed=1)
    ages = [at - began for _, began, at, _ in found]
    assert sorted(number for number, *_ in found) == list(range(30_000))
    assert max(ages) == 3 and min(ages) == 0


def test_a_lead_of_zero_is_synchronous_training() -> None:
    found = simulate(200, 4, 0, DURATIONS["heavy-tailed"])
    assert [(number, began) for number, began, *_ in found] == [(n, n // 4) for n in range(800)]
    assert all(began == at for _, began, at, _ in found)


def test_long_groups_are_not_crowded_out_by_short_ones() -> None:
    """Over any stretch of the run, up to the lead at its ends: short answers do not crowd out long ones."""
    found = simulate(3000, 4, 2, DURATIONS["heavy-tailed"], seed=2)
    by_training = sorted(found, key=lambda row: row[2])
    for start in range(0, 3000, 500):
        trained = {number for number, _, at, _ in by_training if start <= at < start + 500}
        began = set(range(start * 4, (start + 500) * 4))
        assert len(trained ^ began) <= 2 * 4 * 2 * 2  # the window at both ends, coming in and going out


def test_a_slow_group_is_overtaken_until_its_deadline() -> None:
    window = Window(1, 2)
    assert [t.number for t in window.begin()] == [0, 1, 2]  # began at 0: deadline 2
    window.finish(2)
    assert [t.number for t in window.take() or []] == [2]
    window.advance(1)
    assert [t.number for t in window.begin()] == [3]
    window.finish(3)
    assert window.take() is None  # 0 and 1 both have to be trained on by step 2: one of them now
    window.finish(1)
    assert [t.number for t in window.take() or []] == [1]
    window.advance(2)
    assert window.take() is None
    window.finish(0)
    assert [t.number for t in window.take() or []] == [0]


def test_a_step_waits_until_it_is_full() -> None:
    window = Window(3, 1)
    window.begin()
    window.finish(5)
    window.finish(1)
    assert window.take() is None
    window.finish(4)
    assert [t.number for t in window.take() or []] == [1, 4, 5]


def test_no_group_starts_that_no_step_will_train_on() -> None:
    window = Window(2, 5, end=2)
    assert len(window.begin()) == 4
    window.advance(1)
    assert window.begin() == []


def test_a_restored_window_continues() -> None:
    window = Window(2, 1)
    window.begin()
    for number in (3, 0):
        window.finish(number)
    window.take()
    window.advance(1)
    window.begin()
    window.finish(4)
    again = Window(2, 1, step=1)
    state = window.state()
    anew = again.restore(**state)  # type: ignore[arg-type]
    assert [t.number for t in anew] == [1, 2, 5]
    assert {t.began for t in anew} == {1}
    assert list(again.complete) == [4]
    assert again.issued == 6
    for ticket in anew:
        again.finish(ticket.number)
    assert [t.number for t in again.take() or []] == [1, 4]


# -- Background source -------------------------------------------------------------------------------------------------


PARTS: dict[str, Any] = {"attempts": 2, "sampling": Sampling(), "min_group_size": 1}


def test_an_error_between_two_steps_is_raised_by_the_next_one() -> None:
    """All other groups have completed by then, so nothing else wakes the waiting step."""

    async def agent(policy: Any, task: Task) -> str:
        if task.id == "t1":
            await asyncio.sleep(0.05)
            raise InputError("broken")
        return str(await policy.chat(task.messages))

    async def run() -> None:
        made = collector(parity, FunctionAgent(agent))
        made.engine.version = 0
        source = BackgroundSource(made, lambda step: [TASKS[step]], lead=1, steps=2, **PARTS)
        await source.next()  # t0; t1 begins beside it
        await asyncio.sleep(0.1)
        made.engine.version = 1
        source.policy_updated(1)
        with pytest.raises(InputError, match="broken"):
            await asyncio.wait_for(source.next(), 5)

    asyncio.run(run())


def test_two_groups_of_one_task_in_a_step_are_both_kept() -> None:
    async def run() -> None:
        made = collector(parity)
        made.engine.version = 0
        replay = ReplayBuffer(4, 2, lead=3, seed=0)
        source = BackgroundSource(made, lambda step: [TASKS[0], TASKS[0]], lead=3, steps=4, replay=replay, **PARTS)
        first = await source.next()
        assert len(first.groups) == 2 and first.reused == 0 and len(replay.groups) == 2
        assert source.taken == (TASKS[0], TASKS[0])
        made.engine.version = 1
        source.policy_updated(1)
        assert (await source.next()).reused == 2 and len(source.taken) == 4
        source.close()

    asyncio.run(run())


async def quick_steps(steps: int, reward: Any, *, uses: int, lead: int, **parts: Any) -> list[Collected]:
    """The steps of a source whose groups all complete before the next step: two new groups of two attempts each."""
    made = collector(reward)
    answer, made.engine.version = made.engine.generate, 0

    async def generate(token_ids: Any, sampling: Sampling) -> Any:
        completion = await answer(token_ids, sampling)
        return replace(completion, versions=(made.engine.version,) * len(completion.token_ids))

    made.engine.generate = generate  # type: ignore[method-assign]
    tasks = [Task(f"t{n}", ({"role": "user", "content": f"q{n}"},)) for n in range(2 * steps)]
    replay = ReplayBuffer(2 * uses, uses, lead, seed=0)
    source = BackgroundSource(
        made, lambda step: tasks[2 * step : 2 * step + 2], lead=lead, steps=steps, replay=replay, **PARTS, **parts
    )
    found = []
    for step in range(steps):
        found.append(await source.next())
        while source._jobs:
            await asyncio.sleep(0)
        made.engine.version = step + 1
        source.policy_updated(step + 1)
    return found


@pytest.mark.parametrize(("uses", "lead"), [(2, 1), (2, 3), (3, 2), (3, 4)])
def test_groups_that_complete_early_are_still_young_enough_to_be_reused(uses: int, lead: int) -> None:
    found = asyncio.run(quick_steps(10, parity, uses=uses, lead=lead))
    assert [step.reused for step in found] == [2 * min(step, uses - 1) for step in range(10)]
    oldest = [step - oldest_version(group) for step, one in enumerate(found) for group in one.groups]
    assert max(oldest) == lead


def test_a_step_whose_new_groups_all_fail_trains_on_the_reused_ones() -> None:
    def second_fails(task: Task, final_answer: str) -> float:
        if task.id in ("t2", "t3"):
            raise ValueError("no score")
        return parity(final_answer)

    first, second, third = asyncio.run(quick_steps(3, second_fails, uses=2, lead=1))
    assert (len(first.groups), first.reused) == (2, 0)
    assert {g.task.id for g in second.groups} == {"t0", "t1"}
    assert (second.reused, second.dropped, second.failures, second.attempts) == (2, 2, {"reward": 4}, 4)
    assert ([g.task.id for g in third.groups], third.reused) == (["t4", "t5"], 0)


def test_a_step_without_reused_groups_fails_if_its_new_ones_do() -> None:
    def fails(final_answer: str) -> float:
        raise ValueError("no score")

    with pytest.raises(RunFailed, match="No training tasks completed"):
        asyncio.run(quick_steps(1, fails, uses=2, lead=1))


def test_zero_variance_groups_are_neither_reused_nor_trained_on_beside_reused_ones() -> None:
    """The new groups of the first step differ, those of the second do not."""

    def first_differ(task: Task, final_answer: str) -> float:
        return int(final_answer) if task.id in ("t0", "t1") else 1.0

    refill = Refill({"first_differ": 1.0}, False, 0, lambda *_: ())
    first, second, third = asyncio.run(quick_steps(3, first_differ, uses=2, lead=1, refill=refill))
    assert len(first.groups) == 2 and not first.zero_variance
    assert {g.task.id for g in second.groups} == {"t0", "t1"} and second.reused == 2
    assert [g.task.id for g in second.zero_variance] == ["t2", "t3"]
    # A step without any signal trains on its groups nevertheless.
    assert [g.task.id for g in third.groups] == ["t4", "t5"] and third.reused == 0


def test_a_checkpoint_keeps_the_replay_buffer() -> None:
    """Used once of three times, by ticket."""

    def make() -> BackgroundSource:
        made = collector(parity)
        made.engine.version = 0
        replay = ReplayBuffer(4, 3, lead=2, seed=0)
        return BackgroundSource(made, lambda step: TASKS[:2], lead=2, steps=4, replay=replay, **PARTS)

    async def kept() -> tuple[dict[int, ReplayedGroup], dict[int, ReplayedGroup]]:
        before, after = make(), make()
        groups = (await before.next()).groups
        assert before.replay is not None and after.replay is not None
        assert before.replay.groups == {number: ReplayedGroup(group, 1) for number, group in enumerate(groups)}
        after.restore(json.loads(json.dumps(before.state())), 1)
        return before.replay.groups, after.replay.groups

    before, after = asyncio.run(kept())
    assert len(before) == 2 and after == before


def test_a_checkpoint_keeps_complete_groups_and_restarts_the_others() -> None:
    """Of three groups the first is trained on, the second is complete and the third hangs when the process ends."""

    def answers(group: Group) -> list[str]:
        return [episode.final_answer for episode in group.episodes]

    def make(agent: Any = None) -> BackgroundSource:
        made = collector(parity, agent)
        made.engine.version = 1 if agent is None else 0
        return BackgroundSource(made, lambda step: [TASKS[step]], lead=2, steps=3, **PARTS)

    async def agent(policy: Any, task: Task) -> str:
        if task.id == "t2":
            await asyncio.Event().wait()
        return str(await policy.chat(task.messages))

    async def killed() -> tuple[dict[str, Any], Group]:
        source = make(FunctionAgent(agent))
        await source.next()
        while 1 not in source.window.complete:
            await asyncio.sleep(0)
        source.collector.engine.version = 1
        source.policy_updated(1)
        state = json.loads(json.dumps(source.state()))
        jobs = [job for job in source._jobs if not job.done()]
        source.close()
        await asyncio.gather(*jobs, return_exceptions=True)
        assert [job.cancelled() for job in jobs] == [True]
        return state, source._groups[1]

    async def resumed(state: dict[str, Any]) -> list[Group]:
        source = make()
        source.restore(state, 1)
        source.policy_updated(1)
        (second,) = (await source.next()).groups
        source.collector.engine.version = 2
        source.policy_updated(2)
        (third,) = (await source.next()).groups
        return [second, third]

    state, complete = asyncio.run(killed())
    assert state["window"] == {"given": 3, "tickets": [[1, 0, 2], [2, 0, 2]], "complete": [1]}
    second, third = asyncio.run(resumed(state))
    assert second == complete
    (never_killed,) = asyncio.run(collector(parity).groups([TASKS[2]], 2, Sampling(), ("train", 2)))
    assert third.task == TASKS[2] and answers(third) == answers(never_killed)


# -- Replay buffer -----------------------------------------------------------------------------------------------------


def test_numbers_of_numpy_are_stored_as_numbers() -> None:
    """An environment computes its rewards with NumPy: `covey.Done(reward={"reward": np.float32(0.5), ...})`."""
    reported = {"reward": np.float32(0.5), "moves": np.int64(3), "won": True, "unknown": None}
    stored = json.loads(json.dumps(group_to_json(Group(TASKS[0], (Episode(TASKS[0], (), (), given=reported),)))))
    (episode,) = group_from_json(TASKS[0], stored).episodes
    assert episode.given == {"reward": 0.5, "moves": 3, "won": True, "unknown": None}


def group(number: int, *versions: int) -> Group:
    task = Task(str(number), ({"role": "user", "content": "?"},))
    turn = Turn((1,), (2,) * len(versions), (0.0,) * len(versions), versions, StopReason.EOS)
    return Group(task, (Episode(task, (turn,), task.messages),))


def test_the_number_of_new_groups() -> None:
    assert [fresh_groups(8, uses) for uses in (1, 2, 3, 8, 9)] == [8, 4, 3, 1, 1]


def test_the_age_of_a_group_is_that_of_its_oldest_token() -> None:
    assert oldest_version(group(0, 7, 5, 6)) == 5


@pytest.mark.parametrize(("uses", "lead"), [(2, 1), (3, 2), (4, 9)])
def test_a_group_is_used_at_most_max_uses_times_and_never_too_old(uses: int, lead: int) -> None:
    replay, used = ReplayBuffer(12, uses, lead, seed=0), Counter[str]()
    for step in range(200):
        former = replay.draw(step)
        fresh = [(step * replay.fresh + n, group(step * replay.fresh + n, step)) for n in range(replay.fresh)]
        replay.add(fresh)
        assert len({g.task.id for g in former}) == len(former) <= replay.drawn
        assert all(step - oldest_version(g) <= lead for g in former)
        if step >= uses:
            assert len(former) == replay.drawn
        used.update(g.task.id for g in [*former, *(g for _, g in fresh)])
    assert set(used.values()) <= set(range(1, uses + 1)) and max(used.values()) == uses
    assert len(replay.groups) <= replay.fresh * (lead + 1)


def test_the_draw_is_named_by_seed_and_step() -> None:
    def drawn(seed: int, step: int) -> list[str]:
        replay = ReplayBuffer(8, 2, 99, seed)
        replay.add((n, group(n, 0)) for n in range(40))
        return [g.task.id for g in replay.draw(step)]

    assert drawn(0, 5) == drawn(0, 5) != drawn(0, 6)
    assert drawn(1, 5) != drawn(0, 5)
