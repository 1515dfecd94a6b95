"""Collection that goes on by itself: what breaks it is told to whoever waits, and groups keep their tickets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from covey.agents.custom import FunctionAgent
from covey.errors import InputError
from covey.rollout.background import BackgroundSource
from covey.rollout.reuse import Reuse
from covey.types import Sampling, Task
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
        reuse = Reuse(4, 2, lead=3, seed=0)
        source = BackgroundSource(made, lambda step: [TASKS[0], TASKS[0]], lead=3, steps=4, reuse=reuse, **PARTS)
        first = await source.next()
        assert len(first.groups) == 2 and first.reused == 0 and len(reuse.kept) == 2
        assert source.taken == (TASKS[0], TASKS[0])
        made.engine.version = 1
        source.policy_updated(1)
        assert (await source.next()).reused == 2 and len(source.taken) == 4
        source.close()

    asyncio.run(run())
