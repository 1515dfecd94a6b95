"""Collection that goes on by itself: what breaks it is told to whoever waits, and groups keep their tickets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from covey.agents.resolve import FunctionAgent
from covey.errors import InputError
from covey.rollout.asynchronous import BackgroundSource, ReplayBuffer, ReplayedGroup
from covey.types import Group, Sampling, Task
from tests.rollout.test_collector import TASKS, collector, parity

PARTS: dict[str, Any] = {"attempts": 2, "sampling": Sampling(), "min_group_size": 1}


def test_an_error_while_nobody_waits_is_told_to_who_waits_next() -> None:
    """Everybody else is done by then, and nobody will come to wake the one who waits."""

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


def test_a_checkpoint_keeps_the_groups_that_may_be_learned_from_again() -> None:
    """Used once of three times, by ticket."""

    def make() -> BackgroundSource:
        made = collector(parity)
        made.engine.version = 0
        replay = ReplayBuffer(4, 3, lead=3, seed=0)
        return BackgroundSource(made, lambda step: TASKS[:2], lead=0, steps=4, replay=replay, **PARTS)

    async def kept() -> tuple[dict[int, ReplayedGroup], dict[int, ReplayedGroup]]:
        before, after = make(), make()
        groups = (await before.next()).groups
        assert before.replay is not None and after.replay is not None
        assert before.replay.groups == {number: ReplayedGroup(group, 1) for number, group in enumerate(groups)}
        after.restore(json.loads(json.dumps(before.state())), 1)
        return before.replay.groups, after.replay.groups

    before, after = asyncio.run(kept())
    assert len(before) == 2 and after == before


def test_a_checkpoint_keeps_complete_groups_and_begins_the_others_again() -> None:
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
