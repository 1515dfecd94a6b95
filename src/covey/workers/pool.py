"""The pool: assigns workers to calls and sessions, in the order of the requests."""

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
from covey.workers.handle import DONE, RemoteError, WorkerDied, WorkerError, WorkerHandle, WorkersGone, encode_frame
from covey.workers.template import Template

START_SECONDS = 60.0  # for a fork on a busy machine
CLOSE_SECONDS = 2.0  # for closing the objects of a session


@dataclass(frozen=True)
class _Request:
    session: bool
    worker: asyncio.Future[WorkerHandle]


class WorkerPool:
    """Up to `max_workers` processes, forked on demand, that call `functions` by name.

    The functions and their state are copied when the pool is made: workers do not see later changes of this process,
    nor it theirs. Threads, locks held by other threads, CUDA and open connections do not survive a fork: a function
    that needs them creates its own on its first call.

    Requests are served in order. Sessions leave a quarter of the workers, and at least one, to calls, so an episode
    that holds a session can make calls without a deadlock. (For the same reason it should not hold two sessions.) One
    event loop at a time may use a pool; another may follow.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], *, max_workers: int = 64) -> None:
        if max_workers < 1:
            raise ValueError(f"max_workers must be at least 1, got {max_workers}")
        self.functions = dict(functions)
        self.max_workers = max_workers
        self._template = Template(self.functions)
        self._finalizer = weakref.finalize(self, self._template.end)  # at the latest at interpreter exit
        self._gone: WorkersGone | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._made = 0
        self._workers: dict[int, WorkerHandle] = {}
        self._idle: list[WorkerHandle] = []
        self._leased: dict[WorkerHandle, bool] = {}  # True: by a session
        self._waiting: list[_Request] = []

    async def call(self, function: str, /, *args: Any, seconds: float, **kwargs: Any) -> Any:
        """Call a function or coroutine function and return its result. `seconds` excludes waiting for a worker.

        Raises WorkerTimeout, WorkerDied, or RemoteError for the function's own exception. Cancelling it kills the
        worker, because the function may be running.
        """
        message = self._message(function, "call", function, args, kwargs, last=True)
        worker = await self._lease(session=False)
        try:
            return await self._request(worker, function, message, seconds)
        finally:
            self._release(worker)

    async def session(self) -> WorkerSession:
        """A worker for several calls in a row. It must be closed: `async with await pool.session() as session`."""
        return WorkerSession(self, await self._lease(session=True))

    def close(self) -> None:
        """Kill all workers. Pending calls raise WorkersGone."""
        self._break(WorkersGone("the workers were closed"))
        self._finalizer()

    # --- requests and answers

    def _message(self, function: str, what: str, *rest: Any, last: bool = False) -> memoryview:
        if what in ("call", "make") and function not in self.functions:
            raise unknown("function of the workers", function, self.functions)
        try:
            return encode_frame(bytes([last]), (what, *rest))
        except Exception as error:
            raise TypeError(f"the arguments of {function} cannot be sent to a worker: {error}") from error

    async def _request(self, worker: WorkerHandle, function: str, message: memoryview, seconds: float) -> Any:
        answer = await worker.request(function, message, seconds)
        kind, keep, body = answer[0], answer[1], answer[2:]
        worker.usable = worker.usable and bool(keep)
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

    async def _lease(self, *, session: bool) -> WorkerHandle:
        self._enter()
        request = _Request(session, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._serve()
        try:
            worker = await request.worker
        except asyncio.CancelledError:
            if request.worker.done() and not request.worker.cancelled() and not request.worker.exception():
                self._release(request.worker.result())  # assigned and cancelled at the same time
            raise
        try:
            if not worker.started:
                await worker.request("a new worker", memoryview(b""), START_SECONDS)
                worker.started = True
        except BaseException:
            self._release(worker)
            raise
        return worker

    def _release(self, worker: WorkerHandle) -> None:
        if self._leased.pop(worker, None) is None:
            return  # already released
        if worker.usable:
            self._idle.append(worker)
        else:
            self._discard(worker)
        self._serve()

    def _serve(self) -> None:
        """Assign workers to waiting requests, in order, as far as the limits allow."""
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            if request.worker.done():
                continue
            if not self._may_start(request.session):
                self._waiting.append(request)
                continue
            try:
                worker = self._get_worker()
            except OSError as error:
                request.worker.set_exception(WorkersGone(f"no worker can be started: {error}"))
                continue
            self._leased[worker] = request.session
            request.worker.set_result(worker)

    def _may_start(self, session: bool) -> bool:
        sessions = sum(self._leased.values())
        if not session and sessions == len(self._leased):
            return True
        if session and sessions >= max(1, self.max_workers - max(1, self.max_workers // 4)):
            return False
        return len(self._leased) < self.max_workers

    def _get_worker(self) -> WorkerHandle:
        while self._idle:
            worker = self._idle.pop()
            if worker.ready():
                return worker
            self._discard(worker)
        own_end, worker_end = socket.socketpair()
        self._made += 1
        self._workers[self._made] = worker = WorkerHandle(self._made, own_end)
        try:
            self._template.spawn(self._made, worker_end)
        except OSError:
            self._workers.pop(self._made).close()
            raise
        return worker

    def _discard(self, worker: WorkerHandle) -> None:
        worker.close()
        if self._workers.pop(worker.number, None) is not None:  # it is still running
            self._template.kill(worker.number)

    # --- the event loop

    def _enter(self) -> None:
        if self._gone is not None:
            raise self._gone
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RuntimeError("two event loops use the same workers: only one at a time may")
        self._leave()
        self._loop = loop
        loop.add_reader(self._template.control, self._read_reports)
        self._read_reports()

    def _leave(self) -> None:
        """Detach from the event loop, and drop everything unfinished on it."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._template.control)
        self._loop = None
        self._waiting = []
        for worker in [*self._leased]:
            worker.usable = False
            self._release(worker)

    def _read_reports(self) -> None:
        """Handle the workers that have ended."""
        ended, alive = self._template.reports()
        for number, how, tail in ended:
            if (worker := self._workers.pop(number, None)) is None:
                continue
            worker.died(how, tail)
            if worker in self._idle:
                self._idle.remove(worker)
                worker.close()
        if not alive:
            self._break(WorkersGone("the process that workers are forked from has ended\n  was it killed?"))

    def _break(self, why: WorkersGone) -> None:
        if self._gone is not None:
            return
        self._gone = why
        for request in self._waiting:
            if not request.worker.done() and not request.worker.get_loop().is_closed():
                request.worker.set_exception(why)
        for worker in self._leased:
            worker.fail(why)
        self._leave()
        for worker in self._idle:
            worker.close()
        self._idle, self._workers = [], {}


class WorkerSession:
    """One worker, reserved for several calls; what the functions store in `state` is kept between the calls.

    A call that raises an exception of its own leaves the session intact; WorkerTimeout and WorkerDied end it.
    """

    def __init__(self, pool: WorkerPool, worker: WorkerHandle) -> None:
        self._pool = pool
        self._worker: WorkerHandle | None = worker
        self._turn = asyncio.Lock()  # one call at a time; waiting here does not count as call time

    async def call(self, function: str, /, *args: Any, seconds: float, **kwargs: Any) -> Any:
        """Like WorkerPool.call. A function with a parameter named `state` receives the session's state."""
        return await self._request(function, seconds, "call", function, args, kwargs)

    async def make(self, function: str, /, *args: Any, seconds: float, key: str = "made", **kwargs: Any) -> None:
        """Store what the function (or class) returns in the worker, as `state[key]`."""
        await self._request(function, seconds, "make", key, function, args, kwargs)

    async def method(self, name: str, /, *args: Any, seconds: float, key: str = "made", **kwargs: Any) -> Any:
        """Call a method of the object in `state[key]`."""
        return await self._request(name, seconds, "method", key, name, args, kwargs)

    async def close(self) -> None:
        """Close the objects in `state` (aclose, close), newest first, and return the worker; if that fails, kill it."""
        try:
            await self._request("close", CLOSE_SECONDS, "finish", last=True)
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

    async def _request(self, function: str, seconds: float, what: str, *rest: Any, last: bool = False) -> Any:
        message = self._pool._message(function, what, *rest, last=last)
        async with self._turn:
            if self._pool._gone is not None:
                raise self._pool._gone
            if self._worker is None:
                raise WorkerDied(function, "its session is over")
            try:
                return await self._pool._request(self._worker, function, message, seconds)
            finally:
                if self._worker is not None and not self._worker.usable:
                    self._end()

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._pool._release(worker)
