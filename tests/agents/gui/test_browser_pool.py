"""Which browser an episode plays on, with browsers that are not real."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from covey.agents.gui.pool import BrowserFailed, BrowserLost, BrowserPool, start_in_worker


class FakePage:
    def __init__(self, browser: FakeBrowser) -> None:
        self.browser = browser

    async def request(self, what: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self.browser.crashed:
            raise BrowserLost("it crashed")
        if what == "hang":
            raise BrowserFailed("browser_timeout", "too slow")
        return {"browser": self.browser.number}

    async def close(self) -> None:
        self.browser.pages -= 1


class FakeBrowser:
    def __init__(self, number: int) -> None:
        self.number, self.pages, self.most = number, 0, 0
        self.crashed = self.closed = self.ended = False

    async def connect(self) -> FakePage:
        if self.ended:
            raise BrowserLost("connection refused")
        self.pages += 1
        self.most = max(self.most, self.pages)
        return FakePage(self)

    async def close(self) -> None:
        self.closed = True


class Factory:
    def __init__(self, fail: int = 0) -> None:
        self.made: list[FakeBrowser] = []
        self.fail = fail

    async def __call__(self) -> FakeBrowser:
        await asyncio.sleep(0.01)
        if self.fail:
            self.fail -= 1
            raise BrowserFailed("browser", "it does not start")
        self.made.append(FakeBrowser(len(self.made)))
        return self.made[-1]


async def one(pool: BrowserPool, seconds: float = 0.02) -> int:
    async with pool.page(nullcontext) as page:
        await asyncio.sleep(seconds)
        return int((await page.request("look", 1.0))["browser"])


def test_no_browser_starts_before_the_first_page_and_one_page_needs_one_browser() -> None:
    factory = Factory()

    async def run() -> None:
        pool = BrowserPool(factory, browsers=3, pages=2)
        assert factory.made == []
        assert [await one(pool) for _ in range(4)] == [0, 0, 0, 0]
        await pool.close()

    asyncio.run(run())
    assert len(factory.made) == 1 and factory.made[0].closed and factory.made[0].pages == 0


def test_64_episodes_share_two_browsers_and_none_has_more_pages_than_allowed() -> None:
    factory = Factory()

    async def run() -> list[int]:
        pool = BrowserPool(factory, browsers=2, pages=4)
        used = await asyncio.gather(*(one(pool) for _ in range(64)))
        await pool.close()
        return used

    used = asyncio.run(run())
    assert len(factory.made) == 2 and [browser.most for browser in factory.made] == [4, 4]
    assert sorted(used) == [0] * 32 + [1] * 32


def test_a_crash_fails_its_pages_and_the_browser_is_replaced_once() -> None:
    factory = Factory()

    async def run() -> tuple[list[Any], int, int]:
        pool = BrowserPool(factory, browsers=1, pages=4)
        playing = [asyncio.create_task(one(pool, 0.1)) for _ in range(3)]
        await asyncio.sleep(0.05)
        factory.made[0].crashed = True
        failed = await asyncio.gather(*playing, return_exceptions=True)
        after = await one(pool)
        replaced = pool.replaced
        await pool.close()
        return failed, after, replaced

    failed, after, replaced = asyncio.run(run())
    assert [(type(error), error.cause) for error in failed] == [(BrowserLost, "browser")] * 3
    assert (after, replaced, factory.made[0].closed) == (1, 1, True)


def test_a_browser_that_ended_between_two_episodes_is_replaced_without_a_failure() -> None:
    factory = Factory()

    async def run() -> int:
        pool = BrowserPool(factory, browsers=1, pages=1)
        await one(pool)
        factory.made[0].ended = True
        return await one(pool)

    assert asyncio.run(run()) == 1 and factory.made[0].closed


def test_a_page_that_is_too_slow_keeps_its_browser() -> None:
    factory = Factory()

    async def run() -> int:
        pool = BrowserPool(factory, browsers=1, pages=1)
        with pytest.raises(BrowserFailed, match="too slow"):
            async with pool.page(nullcontext) as page:
                await page.request("hang", 1.0)
        return await one(pool)

    assert asyncio.run(run()) == 0 and len(factory.made) == 1


def test_a_failed_start_fails_the_episodes_that_wait_for_it_and_the_next_one_tries_again() -> None:
    factory = Factory(fail=1)

    async def run() -> tuple[list[Any], int]:
        pool = BrowserPool(factory, browsers=1, pages=4)
        failed = await asyncio.gather(*(one(pool) for _ in range(3)), return_exceptions=True)
        return failed, await one(pool)

    failed, after = asyncio.run(run())
    assert [str(error) for error in failed] == ["it does not start"] * 3 and after == 0


def test_a_cancelled_episode_gives_its_place_back_and_does_not_stop_the_start_for_others() -> None:
    factory = Factory()

    async def run() -> list[int]:
        pool = BrowserPool(factory, browsers=1, pages=2)
        first, second, third = (asyncio.create_task(one(pool)) for _ in range(3))
        await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return [await second, await third]

    assert asyncio.run(run()) == [0, 0] and factory.made[0].pages == 0


def test_waiting_for_a_browser_stops_the_clock_of_the_episode() -> None:
    factory, waits = Factory(), []

    class Clock:
        def __enter__(self) -> None:
            waits.append("stopped")

        def __exit__(self, *_: object) -> None:
            waits.append("running")

    async def run() -> None:
        pool = BrowserPool(factory, browsers=1, pages=1)
        async with pool.page(Clock) as page:
            waits.append("playing")
            await page.request("look", 1.0)

    asyncio.run(run())
    assert waits == ["stopped", "running", "stopped", "running", "playing"]


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_browser_without_a_worker_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: str(tmp_path / "browser"))
    (tmp_path / "browser").mkdir()
    error = asyncio.CancelledError() if cancelled else OSError("too many processes")
    with pytest.raises(type(error)):
        asyncio.run(start_in_worker(Mock(session=AsyncMock(side_effect=error)), "chromium"))
    assert not list(tmp_path.iterdir())
