"""Ending a run early: time limit, SIGTERM and Ctrl-C. Also garbage collection, and work that must not be cancelled.

    loop.max_minutes   the step in which the time runs out is the last; a checkpoint follows
    SIGTERM            sent by clusters before the end of a job: the step in progress is the last. Its evaluation,
                       or the one before the first step, is completed
    Ctrl-C (SIGINT)    the first one stops the run in the middle of a step, but never of a write; the same command
                       resumes from the last checkpoint. The second one exits at once

Python delivers signals only to the main thread; a run in another thread has only the time limit.
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

INTERRUPTED = 128 + signal.SIGINT  # exit codes, as shells report them
TERMINATED = 128 + signal.SIGTERM


class TimeLimit:
    """When a run must end. `passed` is called once, at the end of each step; `reached` keeps its result."""

    def __init__(self, minutes: float | None) -> None:
        self.end = None if minutes is None else time.monotonic() + 60 * minutes
        self.reached = False
        self.terminated = False  # by SIGTERM
        self._writes = 0  # in progress
        self._is_pending = False  # a Ctrl-C that waits for a write
        self._interruptions = 0
        # The handler that Ctrl-C had before; under asyncio it cancels the run.
        self._previous_handler: Callable[..., Any] = signal.default_int_handler

    def passed(self) -> bool:
        self.reached = self.end is not None and time.monotonic() >= self.end
        return self.reached

    def terminate(self) -> None:
        """Make the step in progress the last."""
        self.terminated = True
        self.end = time.monotonic()

    @contextmanager
    def shield_writes(self) -> Iterator[None]:
        """Delay Ctrl-C until the writes in this context are complete."""
        self._writes += 1
        try:
            yield
        finally:
            self._writes -= 1
        if self._is_pending and not self._writes:
            self._is_pending = False
            self._previous_handler(signal.SIGINT, None)

    @contextmanager
    def handle_ctrl_c(self) -> Iterator[None]:
        """Handle Ctrl-C in this context. After the first one the handler stays, because closing may take a while."""
        before = signal.getsignal(signal.SIGINT)
        if not callable(before):  # it is ignored (nohup), and stays so
            yield
            return
        self._previous_handler = before
        signal.signal(signal.SIGINT, lambda number, frame: self.interrupt(frame))
        try:
            yield
        finally:
            if not self._interruptions:
                signal.signal(signal.SIGINT, before)

    def interrupt(self, frame: FrameType | None) -> None:
        self._interruptions += 1
        if self._interruptions > 1:
            _exit_now()
        _print_unbuffered("stopping; Ctrl-C again exits immediately")
        if self._writes:
            self._is_pending = True
        else:
            self._previous_handler(signal.SIGINT, frame)


@contextmanager
def time_limit(minutes: float | None) -> Iterator[TimeLimit]:
    limit = TimeLimit(minutes)
    with handle_signals(limit):
        yield limit


@contextmanager
def handle_signals(limit: TimeLimit) -> Iterator[None]:
    """Pass SIGTERM and Ctrl-C to the limit, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with limit.handle_ctrl_c(), handle_sigterm(limit):
        yield


@contextmanager
def handle_sigterm(limit: TimeLimit) -> Iterator[None]:
    """Pass SIGTERM to the limit, in the main thread. The run itself may be in another one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        limit.terminate()
        _print_unbuffered("SIGTERM: the run ends after this step or evaluation, with a checkpoint")

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def restore_ctrl_c() -> Iterator[None]:
    """Restore the handler of Ctrl-C after a whole run, once its last thread has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if callable(before):
            signal.signal(signal.SIGINT, before)


def _print_unbuffered(text: str) -> None:
    """Bypass Python's buffers: the interrupted code may be writing to them."""
    with suppress(OSError):  # the terminal may be closed
        os.write(2, f"\n{text}\n".encode())


def _exit_now() -> NoReturn:
    """Exit without waiting for threads. Workers and sandboxes end with this process in any case."""
    if sys.stdout.isatty():
        with suppress(OSError):
            os.write(1, b"\x1b[?25h")  # the live view hides the cursor
    os._exit(INTERRUPTED)


# -- Garbage collection ------------------------------------------------------------------------------------------------


@contextmanager
def freeze_garbage() -> Iterator[None]:
    """Exclude objects that exist before the first step, mostly modules, from garbage collection.

    Searching them takes 0.2 s of a step now and then. Without them, garbage of the steps is found sooner, and memory
    stays constant.
    """
    gc.collect()
    if gc.get_freeze_count():  # the caller of this run has frozen objects, and will unfreeze them
        yield
        return
    gc.freeze()
    gc.collect()  # resets the counts that decide when to collect
    try:
        yield
    finally:
        gc.unfreeze()


def freeze_more() -> None:
    """Within `freeze_garbage`, also exclude what the first step has created: compiling leaves millions of objects."""
    gc.collect()
    gc.freeze()
    gc.collect()


# -- Cancellation ------------------------------------------------------------------------------------------------------

Result = TypeVar("Result")


async def run_to_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Run work to its end even if the caller is cancelled. Unlike `asyncio.shield`, raises the cancellation after
    it."""
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
