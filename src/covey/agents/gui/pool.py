"""The browsers of a run: a few Chromium processes, each with the pages of several episodes.

A browser runs in a worker process (`browser.py`) and starts when its first page is needed. A browser that crashed, or
that does not answer in time, is killed and replaced; the episodes on its pages fail with the cause `browser`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from covey.errors import NamedFailure
from covey.workers import WorkerError, WorkerPool, WorkerSession

BROWSER = "browser"  # the name of `start_browser` in the worker pool
START_SECONDS = 60.0  # for a browser, on a busy machine
GRACE = 5.0  # seconds that a browser may be late, before it counts as hung
AT_ONCE = 8  # pages of a browser that act at the same time; the deadline of others begins when they may

MAX_TEMP = 70  # characters: the path of a socket may have 107

LENGTH = struct.Struct("!I")
MAX_MESSAGE = 1 << 28


class BrowserFailed(NamedFailure):
    """A page or a browser failed: `browser` (crashed), `browser_timeout`, `page` (cannot be opened), `success`."""


class BrowserLost(BrowserFailed):
    """The whole browser has crashed or hangs."""

    def __init__(self, message: str) -> None:
        super().__init__("browser", message)


class Page(Protocol):
    """The page of one episode."""

    async def request(self, what: str, seconds: float, **arguments: Any) -> dict[str, Any]: ...

    async def close(self) -> None: ...


class Browser(Protocol):
    async def connect(self) -> Page: ...

    async def close(self) -> None:
        """End its processes, within seconds."""
        ...


# -- The pool ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Slot:
    """A browser, if it was started, and its number of pages."""

    pages: int = 0
    browser: asyncio.Task[Browser] | None = None


class BrowserPool:
    """Up to `browsers` browsers with up to `pages` pages each. The browser with the fewest pages is used next."""

    def __init__(self, start: Callable[[], Awaitable[Browser]], browsers: int, pages: int) -> None:
        self._start = start
        self._slots = [_Slot() for _ in range(browsers)]
        self._pages = pages
        self._free = asyncio.Condition()
        self._closing: set[asyncio.Task[None]] = set()
        self.replaced = 0  # browsers that crashed or were killed

    @asynccontextmanager
    async def page(self, waiting: Callable[[], AbstractContextManager[None]]) -> AsyncIterator[Page]:
        """A page for one episode. `waiting` stops the episode's clock until a browser has a place and is started."""
        with waiting():
            slot = await self._place()
        try:
            with waiting():
                browser, page = await self._connect(slot)
            try:
                try:
                    yield page
                finally:
                    await page.close()
            except BrowserLost:
                self._retire(slot, browser)
                raise
        finally:
            slot.pages -= 1
            async with self._free:
                self._free.notify()

    async def close(self) -> None:
        """End all browsers."""
        for slot in self._slots:
            task, slot.browser = slot.browser, None
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled() and task.exception() is None:
                    await task.result().close()
        if self._closing:
            await asyncio.wait(self._closing)
        self._free = asyncio.Condition()  # another event loop may follow

    async def _place(self) -> _Slot:
        async with self._free:
            while True:
                slot = min(self._slots, key=lambda slot: slot.pages)
                if slot.pages < self._pages:
                    slot.pages += 1
                    return slot
                await self._free.wait()

    async def _connect(self, slot: _Slot) -> tuple[Browser, Page]:
        """The slot's browser with a new page. A browser that has ended since its last page is replaced."""
        browser = await self._browser(slot)
        try:
            return browser, await browser.connect()
        except BrowserLost:
            self._retire(slot, browser)
            browser = await self._browser(slot)
            return browser, await browser.connect()

    async def _browser(self, slot: _Slot) -> Browser:
        """The slot's browser. All episodes that wait for it share one start; after an error the next one tries
        again."""
        if slot.browser is None:
            slot.browser = asyncio.ensure_future(self._start())
        task = slot.browser
        try:
            return await asyncio.shield(task)
        except BaseException:
            if task.done() and slot.browser is task:
                slot.browser = None
            raise

    def _retire(self, slot: _Slot, browser: Browser) -> None:
        """Replace a lost browser. Its pages report the loss one after another: only the first one counts."""
        task = slot.browser
        if task is None or not task.done() or task.cancelled() or task.exception() or task.result() is not browser:
            return
        slot.browser = None
        self.replaced += 1
        closing = asyncio.create_task(browser.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


# -- A browser in a worker ---------------------------------------------------------------------------------------------


async def start_in_worker(workers: WorkerPool, executable: str) -> WorkerBrowser:
    """Start a browser in a worker of its own. Its files are in a folder that only this user can read."""
    short = len(tempfile.gettempdir()) < MAX_TEMP
    folder = Path(tempfile.mkdtemp(prefix="covey-browser-", dir=None if short else "/tmp"))  # noqa: S108 - only ours
    session: WorkerSession | None = None
    try:
        session = await workers.session()
        await session.make(BROWSER, executable, str(folder), seconds=START_SECONDS)
    except BaseException as error:
        if session is not None:
            await session.close()
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, WorkerError):
            raise BrowserFailed("browser", f"{executable} does not start: {error}") from error
        raise
    return WorkerBrowser(session, folder)


@dataclass(eq=False)
class WorkerBrowser:
    session: WorkerSession
    folder: Path
    turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def connect(self) -> Connection:
        try:
            return Connection(*await asyncio.open_unix_connection(str(self.folder / "browser.sock")), self.turn)
        except OSError as error:
            raise BrowserLost(f"the browser has ended ({error.strerror})") from error

    async def close(self) -> None:
        await self.session.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(eq=False)
class Connection:
    """An episode's connection to its browser. Closing it closes the page."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    turn: asyncio.Semaphore

    async def request(self, what: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """The browser's answer, or BrowserFailed. The browser itself watches the time, unless it hangs."""
        try:
            async with self.turn, asyncio.timeout(seconds + GRACE):
                await write_message(self.writer, {"what": what, "seconds": seconds, **arguments})
                answer = await read_message(self.reader)
        except TimeoutError:
            raise BrowserLost(f"the browser did not answer within {seconds + GRACE:g} s") from None
        except OSError:
            answer = None
        if answer is None:
            raise BrowserLost("the browser crashed or was killed")
        if "failure" in answer:
            raise BrowserFailed(*answer["failure"])
        return answer

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message; None at the end of the connection."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > MAX_MESSAGE:
            raise OSError(f"a message of {length} bytes")
        message: dict[str, Any] = json.loads(await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        return None
    return message


async def write_message(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    body = json.dumps(message, default=str).encode()  # a value of JavaScript may be a date
    writer.write(LENGTH.pack(len(body)) + body)
    await writer.drain()
