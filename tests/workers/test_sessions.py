"""Sessions: several calls in one worker, the state kept between them, and how they end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.errors import InputError
from covey.workers import RemoteError, WorkerDied, WorkerPool, WorkerTimeout, pool
from tests.workers.processes import gone
from tests.workers.test_pool import fork_and, me

Run = Callable[[Callable[[WorkerPool], Coroutine[Any, Any, Any]]], Any]


class Counter:
    """An environment that writes to a file when it is closed."""

    def __init__(self, start: int, log: Path | None = None) -> None:
        self.value, self.log, self.home = start, log, os.getpid()

    def step(self, by: int = 1) -> int:
        self.value += by
        return self.value

    async def slow_step(self) -> int:
        await asyncio.sleep(0.01)
        return self.step()

    def where(self) -> tuple[int, int]:
        return self.home, os.getpid()

    def close(self) -> None:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{self.value} ")


class Stubborn(Counter):
    def close(self) -> None:
        time.sleep(60)


class Broken(Counter):
    async def aclose(self) -> None:
        raise RuntimeError("no")


def count(state: dict[str, int]) -> int:
    state["calls"] = state.get("calls", 0) + 1
    return state["calls"]


def hang() -> None:
    time.sleep(60)


FUNCTIONS = {"counter": Counter, "stubborn": Stubborn, "broken": Broken, "count": count, "hang": hang, "me": me}


@pytest.fixture
def run() -> Iterator[Run]:
    made = WorkerPool(FUNCTIONS | {"fork_and": fork_and}, max_workers=4)
    yield lambda use: asyncio.run(use(made))
    made.close()


def test_state_lasts_for_the_session_and_is_its_own(run: Run) -> None:
    async def use(pool: WorkerPool) -> list[int]:
        async with await pool.session() as one, await pool.session() as other:
            found = [await s.call("count", seconds=20) for s in (one, one, other, one)]
        found.append(await pool.call("count", seconds=20))  # a call on its own starts with nothing
        found.append(await pool.call("count", seconds=20))
        async with await pool.session() as another:
            return [*found, await another.call("count", seconds=20)]

    assert run(use) == [1, 2, 1, 3, 1, 1, 1]


def test_an_object_lives_in_the_worker(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "closed"

    async def use(pool: WorkerPool) -> None:
        async with await pool.session() as session:
            await session.make("counter", 5, log, seconds=20)
            await session.make("counter", start=50, log=log, key="other", seconds=20)
            assert await session.method("step", seconds=20) == 6
            assert await session.method("step", by=4, key="other", seconds=20) == 54
            assert await session.method("slow_step", seconds=20) == 7
            home, here = await session.method("where", seconds=20)
            assert home == here == await session.call("me", seconds=20)
            with pytest.raises(RemoteError, match="AttributeError"):
                await session.method("stop", seconds=20)
            assert await session.method("step", seconds=20) == 8  # an exception does not end the session
        assert log.read_text() == "54 8 "  # the newest first
        assert await pool.call("me", seconds=20) == home  # given back

    run(use)


def test_calls_of_one_session_come_one_after_the_other(run: Run) -> None:
    async def use(pool: WorkerPool) -> list[int]:
        async with await pool.session() as session:
            return await asyncio.gather(*(session.call("count", seconds=20) for _ in range(20)))

    assert run(use) == list(range(1, 21))


def test_a_deadline_ends_the_session(run: Run) -> None:
    async def use(pool: WorkerPool) -> None:
        session = await pool.session()
        pid = await session.call("me", seconds=20)
        with pytest.raises(WorkerTimeout):
            await session.call("hang", seconds=0.2)
        assert gone(pid)
        with pytest.raises(WorkerDied, match="its session is over"):
            await session.call("me", seconds=20)
        await session.close()
        await session.close()

    run(use)


@pytest.mark.parametrize("kind", ["stubborn", "broken"])
def test_what_cannot_be_closed_is_killed(run: Run, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(pool, "CLOSE_SECONDS", 0.2)

    async def use(pool: WorkerPool) -> int:
        async with await pool.session() as session:
            await session.make(kind, 1, seconds=20)
            return int(await session.call("me", seconds=20))

    assert gone(run(use))


def test_processes_last_as_long_as_the_session(run: Run) -> None:
    async def use(pool: WorkerPool) -> tuple[int, int]:
        async with await pool.session() as session:
            worker, child = await session.call("fork_and", "child", seconds=20)
            assert await session.call("me", seconds=20) == worker
            os.kill(child, 0)
        return worker, child

    assert gone(*run(use))


def test_a_holder_of_a_session_can_still_make_calls() -> None:
    async def episode(pool: WorkerPool) -> int:
        async with await pool.session() as session:
            await session.call("count", seconds=20)
            return int(await pool.call("me", seconds=20))

    async def many(pool: WorkerPool) -> list[int]:
        async with asyncio.timeout(30):
            return await asyncio.gather(*(episode(pool) for _ in range(12)))

    for workers in (1, 2, 5):
        made = WorkerPool(FUNCTIONS, max_workers=workers)
        assert len(asyncio.run(many(made))) == 12
        made.close()


def test_unknown_functions_are_a_mistake(run: Run) -> None:
    async def use(pool: WorkerPool) -> None:
        async with await pool.session() as session:
            with pytest.raises(InputError, match="did you mean   counter"):
                await session.make("counte", seconds=20)
            with pytest.raises(RemoteError, match="KeyError: 'made'"):
                await session.method("step", seconds=20)

    run(use)
