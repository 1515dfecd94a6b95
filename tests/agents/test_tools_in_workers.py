"""Misbehaving tools in real workers: each costs only its own episode."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.agents.tools.session import ToolSession
from covey.agents.tools.tool import ToolFailure
from covey.agents.tools.toolset import ToolSet, resolve_tools
from covey.tool_calls import Call
from covey.workers import WorkerPool


class Unit(Enum):
    METRE = "m"
    MILE = "mi"


@covey.tool
def double(n: int, unit: Unit = Unit.METRE) -> str:
    """Double a length."""
    assert isinstance(unit, Unit)
    return f"{2 * n} {unit.value}"


@covey.tool
async def later(n: int) -> dict[str, int]:
    """Double a number, later."""
    await asyncio.sleep(0.01)
    return {"n": 2 * n}


@covey.tool
def own_loop(n: int) -> int:
    """A plain function that runs an event loop."""
    return asyncio.run(later(n))["n"]


@covey.tool(timeout=1)
def misbehave(how: str) -> Any:
    """Do what a tool should not."""
    match how:
        case "sleep":
            time.sleep(600)
        case "spin":
            while True:
                pass
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        case "exit":
            os._exit(7)
        case "sys.exit":
            sys.exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise":
            raise RuntimeError("a bug of the tool's")
        case "object":
            return object()
        case "function":
            return {"f": misbehave}
        case "down":
            raise covey.ToolFailure("weather", "down")
    raise AssertionError(how)


@covey.tool(timeout=20)
def shout(how: str, megabytes: int) -> str:
    """Much output."""
    block = "x" * (1 << 20)
    if how == "print":
        for _ in range(megabytes):
            print(block)
        return "printed"
    if how == "raise":
        raise ValueError(block * megabytes)
    return block * megabytes


@covey.tool(timeout=20)
def fork(path: str) -> str:
    """Leave processes behind, one of them in a session of its own."""
    for leave in (False, True):
        if os.fork() == 0:
            if leave:
                os.setsid()
            with open(path, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(600)
            os._exit(0)
    while len(Path(path).read_text().splitlines() if Path(path).exists() else []) < 2:
        time.sleep(0.01)
    return "forked"


class Counting:
    def __init__(self, path: str) -> None:
        self.path, self.count = path, 0

    def close(self) -> None:
        Path(self.path).write_text(f"closed at {self.count}")


@covey.tool
def count(path: str, state: dict[str, Any]) -> int:
    """Count the calls of this episode."""
    counting = state.setdefault("count", Counting(path))
    counting.count += 1
    return counting.count


@covey.tool
async def read_count(state: dict[str, Any]) -> int:
    """What another tool counted."""
    return state["count"].count


@covey.tool(timeout=0.5)
def hang_with_state(state: dict[str, Any]) -> str:
    """Hang in the worker that holds the state."""
    time.sleep(600)
    return ""


TOOLS = [double, later, own_loop, misbehave, shout, fork, count, read_count, hang_with_state]


@pytest.fixture(scope="module")
def tools() -> ToolSet:
    return resolve_tools(TOOLS)


@pytest.fixture(scope="module")
def pool(tools: ToolSet) -> Iterator[WorkerPool]:
    made = WorkerPool(tools.functions, max_workers=16)
    yield made
    made.close()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def one(tools: ToolSet, pool: WorkerPool, name: str, **arguments: Any) -> Any:
    async def go() -> Any:
        async with tools.open(pool) as session:
            return (await session.call([Call(name, arguments)]))[0]

    return asyncio.run(go())


def test_values_come_back(tools: ToolSet, pool: WorkerPool) -> None:
    assert one(tools, pool, "double", n="3", unit="mi").text == "6 mi"
    assert one(tools, pool, "later", n=3).text == '{"n": 6}'
    assert one(tools, pool, "own_loop", n=3).text == "6"
    raised = one(tools, pool, "misbehave", how="raise")
    assert (raised.text, raised.use.error) == ("error: RuntimeError: a bug of the tool's", "raised")


FAULTS = {
    "sleep": "tool_timeout",
    "spin": "tool_timeout",
    "deaf": "tool_timeout",
    "exit": "tool_crash",
    "sys.exit": "tool_crash",
    "kill": "tool_crash",
    "object": "tool_result",
    "function": "tool_result",
    "down": "weather",
}


def test_sixty_four_episodes_with_failures(tools: ToolSet, pool: WorkerPool, tmp_path: Path) -> None:
    """Every other episode meets a fault at some turn; the rest get what they would get alone."""
    hows = [*FAULTS, "raise"]

    async def episode(n: int) -> list[str]:
        texts: list[str] = []
        async with tools.open(pool, seconds=20.0) as session:
            for turn in range(3):
                calls = [Call("double", {"n": 10 * n + turn}), Call("count", {"path": str(tmp_path / f"{n}")})]
                if n % 2 and turn == n % 3:
                    calls.insert(1, Call("misbehave", {"how": hows[n // 2 % len(hows)]}))
                texts += [result.text for result in await session.call(calls)]
        return texts

    async def go() -> list[Any]:
        return await asyncio.gather(*map(episode, range(64)), return_exceptions=True)

    results = asyncio.run(go())
    causes: Counter[str] = Counter()
    for n, result in enumerate(results):
        how = hows[n // 2 % len(hows)] if n % 2 else "none"
        if how in FAULTS:
            assert isinstance(result, ToolFailure), (n, how, result)
            causes[result.cause] += 1
            continue
        texts = [text for turn in range(3) for text in (f"{20 * n + 2 * turn} m", str(turn + 1))]
        if how == "raise":
            texts.insert(2 * (n % 3) + 1, "error: RuntimeError: a bug of the tool's")
        assert result == texts, n
        assert (tmp_path / f"{n}").read_text() == "closed at 3"
    assert causes == Counter(FAULTS[hows[n // 2 % len(hows)]] for n in range(1, 64, 2) if n // 2 % len(hows) < 9)


def test_endless_output(tools: ToolSet, pool: WorkerPool) -> None:
    assert one(tools, pool, "shout", how="print", megabytes=256).text == "printed"
    returned = one(tools, pool, "shout", how="return", megabytes=64).text
    assert returned == "x" * 2048 + f"\n[cut: 2048 of {64 << 20} characters]"
    raised = one(tools, pool, "shout", how="raise", megabytes=64)
    assert raised.text.startswith("error: ValueError: xxx") and len(raised.text) < 3000


def test_processes_that_a_tool_leaves_behind_are_killed(tools: ToolSet, pool: WorkerPool, tmp_path: Path) -> None:
    file = tmp_path / "pids"

    async def go() -> list[int]:
        async with tools.open(pool) as session:
            assert (await session.call([Call("fork", {"path": str(file)})]))[0].text == "forked"
        pids = [int(line) for line in file.read_text().split()]
        while any(map(alive, pids)):
            await asyncio.sleep(0.02)
        return pids

    assert len(asyncio.run(asyncio.wait_for(go(), 30))) == 2


def test_state_is_shared_and_closed(tools: ToolSet, pool: WorkerPool, tmp_path: Path) -> None:
    file = str(tmp_path / "count")

    async def go() -> list[str]:
        async with tools.open(pool) as session:
            calls = [Call("count", {"path": file}), Call("count", {"path": file}), Call("read_count")]
            return [result.text for result in await session.call(calls)]

    assert asyncio.run(go()) == ["1", "2", "2"]
    assert Path(file).read_text() == "closed at 2"


def test_a_stateful_tool_that_hangs_costs_its_episode(tools: ToolSet, pool: WorkerPool, tmp_path: Path) -> None:
    file = str(tmp_path / "count")

    async def go() -> tuple[str, str]:
        async with tools.open(pool) as other:
            await other.call([Call("count", {"path": file})])
            with pytest.raises(ToolFailure) as caught:
                async with tools.open(pool) as session:
                    await session.call([Call("hang_with_state")])
            return caught.value.cause, (await other.call([Call("count", {"path": file})]))[0].text

    assert asyncio.run(go()) == ("tool_timeout", "2")


def test_a_cancelled_episode_frees_its_workers(tools: ToolSet, pool: WorkerPool) -> None:
    async def busy(session: ToolSession) -> None:
        async with session:
            await session.call([Call("misbehave", {"how": "spin"}), Call("hang_with_state")])

    async def go() -> str:
        running = [asyncio.ensure_future(busy(tools.open(pool))) for _ in range(12)]
        await asyncio.sleep(0.2)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        async with tools.open(pool) as session:
            return (await session.call([Call("double", {"n": 1})]))[0].text

    assert asyncio.run(go()) == "2 m"


def test_closures_can_be_tools() -> None:
    factor = 3

    def triple(n: int) -> int:
        """Triple a number."""
        return factor * n

    tools = resolve_tools([triple])
    pool = WorkerPool(tools.functions, max_workers=1)
    try:
        assert one(tools, pool, "triple", n=2).text == "6"
    finally:
        pool.close()
