"""Drives a run from synchronous code, step by step.

All coroutines of the run execute on one event loop in a separate thread. So it works in a notebook, which has its own
running loop, and with `mode=async` episodes continue between two calls. The calling thread waits and runs callbacks,
which may use the trainer themselves.

Ctrl-C cancels the call, waits until the run has stopped, and raises KeyboardInterrupt. A second one raises at once; the
next call then waits instead. `Run.step` continues after a cancelled call.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Future
from queue import SimpleQueue
from types import FrameType
from typing import Any, Generic, TypeVar

from covey.errors import InputError, RunFailed
from covey.training.callbacks import call_here
from covey.training.interrupts import handle_sigterm, run_to_end
from covey.training.run import Run

Result = TypeVar("Result")
Messages = SimpleQueue[Callable[[], None] | None]  # to a waiting thread: a function to run there, or None to stop


def INTERRUPT() -> None:
    """The message that Ctrl-C was pressed."""


class Driver:
    def __init__(self, run: Run) -> None:
        self.run = run
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._stop: asyncio.Event | None = None
        self._lock = threading.RLock()  # one call at a time; calls of a callback are nested in its step
        self._queues: list[Messages] = []  # of the calls in progress, innermost last
        self._abandoned: list[Future[Any]] = []  # calls that are still stopping after a second Ctrl-C
        self._ended = False
        run.callbacks.call = self._in_caller
        self._thread = threading.Thread(target=self._serve, name="covey-run", daemon=True)
        self._thread.start()
        self._loop = self._started.result()

    @property
    def in_callback(self) -> bool:
        return bool(self._queues)

    # -- In the calling thread -----------------------------------------------------------------------------------------

    def call(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Run a coroutine of the run and return its result. An error ends the run; Ctrl-C does not."""
        if threading.current_thread() is self._thread:
            raise InputError("the trainer cannot be used from inside the run (by an agent)\n  use it in a callback")
        with self._lock:
            self._await_abandoned()
            if self._ended:
                raise InputError("the run has ended, and its engine is closed\n  make a new Trainer to continue")
            nested = bool(self._queues)  # in a callback: its error ends the surrounding step
            try:
                return self._complete(work())
            except Exception as error:
                if not nested:
                    self.close(error)
                raise

    def close(self, error: BaseException | None = None) -> None:
        """End the run and its thread. Further calls do nothing."""
        if threading.current_thread() is self._thread:  # by garbage collection, which may run in any thread
            threading.Thread(target=self.close, args=(error,), name="covey-close").start()
            return
        with self._lock:
            if self._ended:
                return
            self._ended = True
            try:
                self._complete(run_to_end(self.run.close(error)))
            finally:
                assert self._stop is not None
                self._loop.call_soon_threadsafe(self._stop.set)
                self._thread.join()
                self.run.callbacks.call = call_here  # breaks a reference cycle, so that memory is freed at once

    def _complete(self, work: Coroutine[Any, Any, Result]) -> Result:
        queue: Messages = SimpleQueue()
        with _Interrupts(queue) as interrupts:
            self._queues.append(queue)  # before the work starts: it may call back at once
            try:
                return self._wait(_Call(self._loop, work, lambda: queue.put(None)), queue, interrupts)
            finally:
                self._queues.remove(queue)

    def _wait(self, call: _Call[Result], queue: Messages, interrupts: _Interrupts) -> Result:
        """Wait for the call, and run callbacks in this thread meanwhile."""
        interrupted = False
        with handle_sigterm(self.run.limit):
            while (message := queue.get()) is not None:
                if message is INTERRUPT or not interrupts.run(message):
                    if interrupted:
                        self._abandoned.append(call.done)
                        raise KeyboardInterrupt
                    interrupted = True
                    call.cancel()
        if not interrupted:
            return call.done.result()
        failure = call.done.exception()
        if failure is not None and not isinstance(failure, asyncio.CancelledError):
            raise failure
        raise KeyboardInterrupt

    def _await_abandoned(self) -> None:
        while self._abandoned:
            try:
                self._abandoned[0].result()
            except (FutureCancelled, asyncio.CancelledError):
                pass
            except RunFailed as error:
                self._abandoned.clear()
                self.close(error)
                raise
            self._abandoned.pop(0)

    # -- In the run's thread -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        async def until_stopped() -> None:
            self._stop = asyncio.Event()
            self._started.set_result(asyncio.get_running_loop())
            await self._stop.wait()

        asyncio.run(until_stopped())

    async def _in_caller(self, function: Callable[[], Any]) -> Any:
        """Run a callback in the waiting thread, or here if none is waiting any more."""
        if not self._queues:
            return function()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def resolve(result: Any, error: BaseException | None) -> None:
            if future.done():  # cancelled
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def call() -> None:
            if future.done():
                return
            try:
                result = function()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                loop.call_soon_threadsafe(resolve, None, error)
            else:
                loop.call_soon_threadsafe(resolve, result, None)

        self._queues[-1].put(call)
        return await future


class _Interrupts:
    """Turns Ctrl-C into a message to the waiting main thread: an exception at an arbitrary line of the driver could
    lose a call in progress. In callbacks it is raised as usual."""

    def __init__(self, queue: Messages) -> None:
        self._queue = queue
        self._before: Callable[..., Any] | None = None
        self._raises = False

    def __enter__(self) -> _Interrupts:
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before):  # not if it is ignored
            self._before = before
            signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if not self._raises:
            self._queue.put(INTERRUPT)
        elif self._before is not None:
            self._before(number, frame)

    def run(self, callback: Callable[[], None]) -> bool:
        """Run a callback. False if Ctrl-C ended it."""
        try:
            self._raises = True
            callback()
            return True
        except KeyboardInterrupt:
            return False
        finally:
            self._raises = False


class _Call(Generic[Result]):
    """A coroutine on the loop of another thread. It can be cancelled and then still be awaited."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result], at_end: Callable[[], None]
    ) -> None:
        self.done: Future[Result] = Future()
        self._loop = loop
        self._task: asyncio.Task[Result] | None = None
        self._at_end = at_end
        loop.call_soon_threadsafe(self._start, work)

    def _start(self, work: Coroutine[Any, Any, Result]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[Result]) -> None:
        if task.cancelled():
            self.done.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(task.result())
        self._at_end()

    def cancel(self) -> None:
        def now() -> None:
            if self._task is not None:
                self._task.cancel()

        self._loop.call_soon_threadsafe(now)
