"""How long a process may train, and who may end it sooner.

    loop.max_minutes   the step in which they pass is the last; a checkpoint follows
    SIGTERM            with which clusters announce the end of a job: the step in progress is the last. Its evaluation,
                       or the one before the first step, is finished; no further step follows
    Ctrl-C (SIGINT)    the first stops the run in the middle of a step, never in the middle of a write: the same command
                       goes on from the last checkpoint. The second leaves at once, as a kill would

Signals reach only the main thread; a run in another one has the clock alone.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, TypeVar

INTERRUPTED = 128 + signal.SIGINT  # exit codes, as shells name them
TERMINATED = 128 + signal.SIGTERM


class TimeLimit:
    """`passed` is asked once a step, at its very end; `reached` keeps the answer."""

    def __init__(self, minutes: float | None) -> None:
        self.end = None if minutes is None else time.monotonic() + 60 * minutes
        self.reached = False
        self.terminated = False  # by SIGTERM
        self._writes = 0
        self._waiting = False  # a Ctrl-C that came in the middle of a write
        self._interruptions = 0
        self._interrupt: Callable[..., Any] = (
            signal.default_int_handler
        )  # what Ctrl-C does otherwise: under asyncio, cancel the run

    def passed(self) -> bool:
        self.reached = self.end is not None and time.monotonic() >= self.end
        return self.reached

    def now(self) -> None:
        """The step in progress is the last."""
        self.terminated = True
        self.end = time.monotonic()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What is written meanwhile is written to its end: a Ctrl-C waits for that."""
        self._writes += 1
        try:
            yield
        finally:
            self._writes -= 1
        if self._waiting and not self._writes:
            self._waiting = False
            self._interrupt(signal.SIGINT, None)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C is ours meanwhile. Once it was pressed it stays so: closing what is open may take a while too."""
        before = signal.getsignal(signal.SIGINT)
        if not callable(before):  # it is ignored (nohup), and stays so
            yield
            return
        self._interrupt = before
        signal.signal(signal.SIGINT, lambda number, frame: self.interrupt(frame))
        try:
            yield
        finally:
            if not self._interruptions:
                signal.signal(signal.SIGINT, before)

    def interrupt(self, frame: FrameType | None) -> None:
        self._interruptions += 1
        if self._interruptions > 1:
            _leave()
        _say("stopping; Ctrl-C again leaves at once")
        if self._writes:
            self._waiting = True
        else:
            self._interrupt(signal.SIGINT, frame)


@contextmanager
def time_limit(minutes: float | None) -> Iterator[TimeLimit]:
    limit = TimeLimit(minutes)
    with signals_to(limit):
        yield limit


@contextmanager
def signals_to(limit: TimeLimit) -> Iterator[None]:
    """SIGTERM and Ctrl-C reach the limit meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with limit.interruptible(), terminable(limit):
        yield


@contextmanager
def terminable(limit: TimeLimit) -> Iterator[None]:
    """SIGTERM reaches the limit meanwhile, if this is the main thread: the run itself may be in another one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: FrameType | None) -> None:
        limit.now()
        _say("SIGTERM: the run ends after this step or evaluation, with a checkpoint")

    before = signal.signal(signal.SIGTERM, over)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def own_interrupts() -> Iterator[None]:
    """Around a whole run, to the end of its last thread: behind it, Ctrl-C does what it did before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if callable(before):
            signal.signal(signal.SIGINT, before)


def _say(text: str) -> None:
    """Past Python's buffers: who is interrupted may be writing to them."""
    with suppress(OSError):  # a terminal that went away
        os.write(2, f"\n{text}\n".encode())


def _show_cursor() -> None:
    """The live view hides it."""
    with suppress(OSError):
        os.write(1, b"\x1b[?25h")


def _leave() -> NoReturn:
    """No thread that still computes is waited for. Workers and sandboxes end with this process, whatever its end."""
    if sys.stdout.isatty():
        _show_cursor()
    os._exit(INTERRUPTED)


# -- Python's garbage collection during a run --------------------------------------------------------------------------


@contextmanager
def set_aside() -> Iterator[None]:
    """What stands before the first step, most of it modules, is not searched for garbage again: that takes 0.2 s of a
    step every so often. What steps leave behind is then few enough to be found soon, and memory stays level."""
    gc.collect()
    if gc.get_freeze_count():  # by somebody around this run, who will end it
        yield
        return
    gc.freeze()
    gc.collect()  # of nothing: how much there is decides when it is searched again
    try:
        yield
    finally:
        gc.unfreeze()


# -- Work that comes to its end although its caller is cancelled meanwhile ---------------------------------------------

Result = TypeVar("Result")


async def uninterrupted(work: Coroutine[Any, Any, Result]) -> Result:
    """Unlike `asyncio.shield`, this waits for the work before it raises the cancellation."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not (not task.cancelled() and task.exception()):
        raise cancelled
    return task.result()
