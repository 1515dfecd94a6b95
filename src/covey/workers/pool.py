"""Who gets which worker, and when."""

from __future__ import annotations

import asyncio
import pickle
import socket
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from covey.errors import unknown
from covey.workers.link import DONE, Link, RemoteError, WorkerDied, WorkerError, WorkersGone, framed
from covey.workers.template import Template

START_SECONDS = 60.0  # for a fork, on a machine that is busy with other things
CLOSE_SECONDS = 2.0  # for what a session left to be closed


@dataclass(frozen=True)
class _Waiter:
    session: bool
    turn: asyncio.Future[Link]


class WorkerPool:
    """Up to `max_workers` processes, made when they are needed, that call `functions` by name.

    The functions are those of this moment, in the state of this moment: what this process changes later, workers do not
    see, and what a worker changes is its own. Threads, locks that other threads hold, CUDA and connections that are in
    use do not survive a fork: a function that needs them makes its own on its first call.

    Who comes first is served first. Sessions leave a quarter of the workers, and always one, to calls: an episode that
    holds a session may make calls without all waiting for each other. (For the same reason it should not hold two.)
    One event loop at a time may use a pool; another one may follow.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], *, max_workers: int = 64) -> None:
        if max_workers < 1:
            raise ValueError(f"max_workers must be at least 1, got {max_workers}")
        self.functions = dict(functions)
        self.max_workers = max_workers
        self._template = Template(self.functions)
        self._finalizer = weakref.finalize(self, self._template.end)  # at the latest when the interpreter ends
        self._gone: WorkersGone | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._made = 0
        self._links: dict[int, Link] = {}
        self._idle: list[Link] = []
        self._leased: dict[Link, bool] = {}  # True: to a session
        self._waiting: list[_Waiter] = []

    async def call(self, function: str, /, *args: Any, seconds: float, **kwargs: Any) -> Any:
        """What the function returns, or what its coroutine does. Waiting for a worker is not part of the seconds.

        Raises WorkerTimeout, WorkerDied, or RemoteError for the function's own exception. Cancelled, it kills the
        worker: the function may be at work.
        """
        message = self._message(function, "call", function, args, kwargs, last=True)
        link = await self._lease(session=False)
        try:
            return await self._ask(link, function, message, seconds)
        finally:
            self._release(link)

    async def session(self) -> WorkerSession:
        """A worker for several calls in a row. It must be closed: `async with await pool.session() as session`."""
        return WorkerSession(self, await self._lease(session=True))

    def close(self) -> None:
        """Kill everything. Who still waits for something hears WorkersGone."""
        self._break(WorkersGone("the workers were closed"))
        self._finalizer()

    # --- questions and answers

    def _message(self, function: str, what: str, *rest: Any, last: bool = False) -> memoryview:
        if what in ("call", "make") and function not in self.functions:
            raise unknown("function of the workers", function, self.functions)
        try:
            return framed(bytes([last]), (what, *rest))
        except Exception as error:
            raise TypeError(f"the arguments of {function} cannot be sent to a worker: {error}") from error

    async def _ask(self, link: Link, function: str, message: memoryview, seconds: float) -> Any:
        answer = await link.ask(function, message, seconds)
        kind, keep, body = answer[0], answer[1], answer[2:]
        link.usable = link.usable and bool(keep)
        try:
            value = pickle.loads(body)  # noqa: S301 - of a fork of this process: SECURITY.md
        except Exception as error:
            raise RemoteError(type(error).__name__, f"the result of {function} cannot be read here: {error}") from error
        if kind == DONE:
            return value
        if not isinstance(value, tuple) or len(value) != 4:
            raise RemoteError("TypeError", f"the answer of {function} cannot be read here")
        raise RemoteError(*map(str, value))

    # --- workers

    async def _lease(self, *, session: bool) -> Link:
        self._enter()
        waiter = _Waiter(session, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._serve()
        try:
            link = await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled() and not waiter.turn.exception():
                self._release(waiter.turn.result())  # its turn had come in the same moment
            raise
        try:
            if not link.started:
                await link.ask("a new worker", memoryview(b""), START_SECONDS)
                link.started = True
        except BaseException:
            self._release(link)
            raise
        return link

    def _release(self, link: Link) -> None:
        if self._leased.pop(link, None) is None:
            return  # taken back already
        if link.usable:
            self._idle.append(link)
        else:
            self._discard(link)
        self._serve()

    def _serve(self) -> None:
        """Give workers to those who wait, in order, as far as there is room."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if waiter.turn.done():
                continue
            if not self._room(waiter.session):
                self._waiting.append(waiter)
                continue
            try:
                link = self._take()
            except OSError as error:
                waiter.turn.set_exception(WorkersGone(f"no worker can be made: {error}"))
                continue
            self._leased[link] = waiter.session
            waiter.turn.set_result(link)

    def _room(self, session: bool) -> bool:
        sessions = sum(self._leased.values())
        if not session and sessions == len(self._leased):
            return True
        if session and sessions >= max(1, self.max_workers - max(1, self.max_workers // 4)):
            return False
        return len(self._leased) < self.max_workers

    def _take(self) -> Link:
        while self._idle:
            link = self._idle.pop()
            if link.fresh():
                return link
            self._discard(link)
        ours, theirs = socket.socketpair()
        self._made += 1
        self._links[self._made] = link = Link(self._made, ours)
        try:
            self._template.spawn(self._made, theirs)
        except OSError:
            self._links.pop(self._made).close()
            raise
        return link

    def _discard(self, link: Link) -> None:
        link.close()
        if self._links.pop(link.number, None) is not None:  # it has not ended by itself
            self._template.kill(link.number)

    # --- the event loop

    def _enter(self) -> None:
        if self._gone is not None:
            raise self._gone
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RuntimeError("two event loops use the same workers: one at a time can")
        self._leave()
        self._loop = loop
        loop.add_reader(self._template.control, self._hear)
        self._hear()

    def _leave(self) -> None:
        """Let go of an event loop, with all that was left unfinished on it."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._template.control)
        self._loop = None
        self._waiting = []
        for link in [*self._leased]:
            link.usable = False
            self._release(link)

    def _hear(self) -> None:
        """Of workers that have ended."""
        ended, alive = self._template.reports()
        for number, how, tail in ended:
            if (link := self._links.pop(number, None)) is None:
                continue
            link.died(how, tail)
            if link in self._idle:
                self._idle.remove(link)
                link.close()
        if not alive:
            self._break(WorkersGone("the process that workers are forked from has ended\n  was it killed?"))

    def _break(self, why: WorkersGone) -> None:
        if self._gone is not None:
            return
        self._gone = why
        for waiter in self._waiting:
            if not waiter.turn.done() and not waiter.turn.get_loop().is_closed():
                waiter.turn.set_exception(why)
        for link in self._leased:
            link.fail(why)
        self._leave()
        for link in self._idle:
            link.close()
        self._idle, self._links = [], {}


class WorkerSession:
    """One worker for as long as the session lasts: what its functions keep in `state` is there at the next call.

    A call that fails by its own exception leaves the session as it is; after WorkerTimeout or WorkerDied it is over.
    """

    def __init__(self, pool: WorkerPool, link: Link) -> None:
        self._pool = pool
        self._link: Link | None = link
        self._turn = asyncio.Lock()  # one call at a time; who waits here is not late

    async def call(self, function: str, /, *args: Any, seconds: float, **kwargs: Any) -> Any:
        """As of the pool. A function with a parameter called `state` is given the session's."""
        return await self._ask(function, seconds, "call", function, args, kwargs)

    async def make(self, function: str, /, *args: Any, seconds: float, key: str = "made", **kwargs: Any) -> None:
        """Keep what the function (a class, perhaps) returns in the worker, in `state[key]`."""
        await self._ask(function, seconds, "make", key, function, args, kwargs)

    async def method(self, name: str, /, *args: Any, seconds: float, key: str = "made", **kwargs: Any) -> Any:
        """Call a method of what was made, or of anything else in `state`."""
        return await self._ask(name, seconds, "method", key, name, args, kwargs)

    async def close(self) -> None:
        """Close what is in `state` (aclose, close), newest first, and give the worker back; or else it is killed."""
        try:
            await self._ask("close", CLOSE_SECONDS, "nothing", last=True)
        except (WorkerError, WorkersGone):
            pass
        finally:
            self._end()

    async def __aenter__(self) -> WorkerSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, function: str, seconds: float, what: str, *rest: Any, last: bool = False) -> Any:
        message = self._pool._message(function, what, *rest, last=last)
        async with self._turn:
            if self._pool._gone is not None:
                raise self._pool._gone
            if self._link is None:
                raise WorkerDied(function, "its session is over")
            try:
                return await self._pool._ask(self._link, function, message, seconds)
            finally:
                if self._link is not None and not self._link.usable:
                    self._end()

    def _end(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._pool._release(link)
