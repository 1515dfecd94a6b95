"""Drives a run from synchronous code, step by step.

The run's coroutines all run on one event loop, in a thread of its own: it works inside a notebook, whose own loop is
running, and episodes of `mode=async` go on between two calls. The calling thread waits, and meanwhile runs what the
run asks it to (callbacks), so that those may use the run themselves.

Ctrl-C cancels what was asked for, waits until that has come to rest, and raises KeyboardInterrupt; a second one raises
at once, and the next call waits. What a cancelled call leaves behind is the run's matter (`Run.step`).
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
from covey.training.interrupts import terminable, uninterrupted
from covey.training.run import Run

Result = TypeVar("Result")
Messages = SimpleQueue[Callable[[], None] | None]  # to a thread that waits: what to run there, or None at the end


def INTERRUPT() -> None:
    """The message that Ctrl-C was pressed."""


class Driver:
    def __init__(self, run: Run) -> None:
        self.run = run
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._stop: asyncio.Event | None = None
        self._order = threading.RLock()  # one call at a time; a callback's own calls are inside its step's
        self._waiting: list[Messages] = []  # of the calls in progress, innermost last
        self._unsettled: list[Future[Any]] = []  # calls that were given up before they came to rest
        self._ended = False
        run.callbacks.call = self._in_caller
        self._thread = threading.Thread(target=self._serve, name="covey-run", daemon=True)
        self._thread.start()
        self._loop = self._started.result()

    @property
    def in_callback(self) -> bool:
        return bool(self._waiting)

    # -- the calling thread ----------------------------------------------------------------------------------------

    def call(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """The result of a coroutine of the run. Where it fails the run ends; Ctrl-C leaves it as it is."""
        if threading.current_thread() is self._thread:
            raise InputError("the trainer cannot be used by what runs inside of it (an agent)\n  use it in a callback")
        with self._order:
            self._settle()
            if self._ended:
                raise InputError("the run has ended, and its engine is closed\n  make a new Trainer to go on")
            nested = bool(self._waiting)  # inside a callback, whose error ends the step that it belongs to
            try:
                return self._complete(work())
            except Exception as error:
                if not nested:
                    self.close(error)
                raise

    def close(self, error: BaseException | None = None) -> None:
        """End the run and the thread. Closing twice is closing once."""
        if threading.current_thread() is self._thread:  # garbage collection may happen in any thread
            threading.Thread(target=self.close, args=(error,), name="covey-close").start()
            return
        with self._order:
            if self._ended:
                return
            self._ended = True
            try:
                self._complete(uninterrupted(self.run.close(error)))
            finally:
                assert self._stop is not None
                self._loop.call_soon_threadsafe(self._stop.set)
                self._thread.join()
                self.run.callbacks.call = call_here  # nothing refers in a circle any more: memory is freed at once

    def _complete(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run it on the loop, and wait."""
        queue: Messages = SimpleQueue()
        with _Interrupts(queue) as interrupts:
            self._waiting.append(queue)  # before the work begins: it may have something to ask at once
            try:
                return self._wait(_Call(self._loop, work, lambda: queue.put(None)), queue, interrupts)
            finally:
                self._waiting.remove(queue)

    def _wait(self, call: _Call[Result], queue: Messages, interrupts: _Interrupts) -> Result:
        """Wait, and run meanwhile what the run asks for."""
        interrupted = False
        with terminable(self.run.limit):
            while (message := queue.get()) is not None:
                if message is INTERRUPT or not interrupts.run(message):
                    if interrupted:
                        self._unsettled.append(call.done)
                        raise KeyboardInterrupt
                    interrupted = True
                    call.cancel()
        if not interrupted:
            return call.done.result()
        failure = call.done.exception()
        if failure is not None and not isinstance(failure, asyncio.CancelledError):
            raise failure
        raise KeyboardInterrupt

    def _settle(self) -> None:
        """Wait for calls that were given up by a second Ctrl-C."""
        while self._unsettled:
            try:
                self._unsettled[0].result()
            except (FutureCancelled, asyncio.CancelledError):
                pass
            except RunFailed as error:
                self._unsettled.clear()
                self.close(error)
                raise
            self._unsettled.pop(0)

    # -- the run's thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        async def until_stopped() -> None:
            self._stop = asyncio.Event()
            self._started.set_result(asyncio.get_running_loop())
            await self._stop.wait()

        asyncio.run(until_stopped())

    async def _in_caller(self, function: Callable[[], Any]) -> Any:
        """Run a function of the user's in the thread that waits; if none does any more, here."""
        if not self._waiting:
            return function()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if answer.done():  # cancelled
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        def asked() -> None:
            if answer.done():
                return
            try:
                result = function()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                loop.call_soon_threadsafe(settle, None, error)
            else:
                loop.call_soon_threadsafe(settle, result, None)

        self._waiting[-1].put(asked)
        return await answer


class _Interrupts:
    """Ctrl-C becomes a message to the thread that waits, the main one: raised between two of our own lines it could
    leave a call behind that nobody waits for. In functions of the user's it is raised as ever."""

    def __init__(self, queue: Messages) -> None:
        self._queue = queue
        self._before: Callable[..., Any] | None = None
        self._raises = False

    def __enter__(self) -> _Interrupts:
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before):  # not where it is ignored
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

    def run(self, asked: Callable[[], None]) -> bool:
        """Call a function of the user's; False where Ctrl-C ended it."""
        try:
            self._raises = True
            asked()
            return True
        except KeyboardInterrupt:
            return False
        finally:
            self._raises = False


class _Call(Generic[Result]):
    """A coroutine on another thread's loop, which can be cancelled and then still be waited for."""

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
