"""Generated pages played in a browser: by their solutions, and at random."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

from covey.config.schema import DataConfig
from covey.tasks import load_tasks
from covey.tasks.gui_pages import KINDS
from covey.types import Task
from tests.agents.gui.browsing import ScriptedPolicy, call, gui, needs_browser

pytestmark = needs_browser


class Watched:
    """A browser pool that keeps the page of the episode, for a player that looks elements up."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.shown: Any = None

    @asynccontextmanager
    async def page(self, waiting: Any) -> AsyncIterator[Any]:
        async with self.pool.page(waiting) as page:
            self.shown = page
            yield page

    async def centre(self, selector: str) -> list[float]:
        code = f"(() => {{ const r = document.querySelector('{selector}').getBoundingClientRect();"
        code += " return [r.x + r.width / 2, r.y + r.height / 2] })()"
        state = await self.shown.request("finish", 10.0, values={"at": code}, answer="", html=False)
        return list(state["values"]["at"])


def solver(task: Task, pool: Watched) -> Any:
    steps = iter(task.columns["solution"])

    async def script(messages: Sequence[Mapping[str, Any]]) -> str:
        step = next(steps, None)
        if step is None:
            return call("terminate", status="success")
        at = await pool.centre(step["selector"]) if "selector" in step else None
        match step["do"]:
            case "click":
                return call("left_click", coordinate=at)
            case "type":
                return call("type", text=step["text"])
            case "key":
                return call("key", keys=step["keys"])
        return call("scroll", coordinate=at, pixels=-step["by"][1])

    return script


def guesser(seed: int) -> Any:
    rng = Random(seed)
    turns = iter(range(8))

    async def script(messages: Sequence[Mapping[str, Any]]) -> str:
        if next(turns, None) is None:
            return call("terminate", status="success")
        action = rng.choice(["left_click", "left_click", "left_click", "key"])
        if action == "key":
            return call("key", keys=[rng.choice(["right", "left", "tab", "enter"])])
        return call(action, coordinate=[rng.randrange(480), rng.randrange(400)])

    return script


def one_of_each_kind(split: str) -> list[Task]:
    tasks = getattr(load_tasks(DataConfig(name="gui_pages", train_size=100, val_size=60), 3), split)
    return [next(task for task in tasks if task.columns["kind"] == kind) for kind in KINDS]


def test_the_solutions_solve_every_kind_of_page_and_random_actions_do_not() -> None:
    tasks = one_of_each_kind("train") + one_of_each_kind("validation")

    async def rewards(agent: Any) -> tuple[list[float], list[float]]:
        async with agent:

            async def solve(task: Task) -> float:
                watched = Watched(agent.pool)
                player = replace(agent, pool=watched)
                return (await player.run(ScriptedPolicy(solver(task, watched)), task)).given["reward"]

            async def guess(number: int, task: Task) -> float:
                return (await agent.run(ScriptedPolicy(guesser(number)), task)).given["reward"]

            solved = await asyncio.gather(*map(solve, tasks))
            return solved, await asyncio.gather(*(guess(number, task) for number, task in enumerate(tasks)))

    with gui(browsers=1, seconds=20.0) as agent:
        solved, guessed = asyncio.run(rewards(agent))
    assert dict(zip([f"{t.columns['kind']}, {t.columns['layout']}" for t in tasks], solved, strict=True)) == {
        f"{t.columns['kind']}, {t.columns['layout']}": 1.0 for t in tasks
    }
    assert statistics.fmean(guessed) < 0.5
