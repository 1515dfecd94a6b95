"""How long a process may train."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeLimit:
    """Looked at once a step: what it says then holds for the whole of it."""

    def __init__(self, minutes: float | None) -> None:
        self.end = None if minutes is None else time.monotonic() + 60 * minutes
        self.reached = False

    def passed(self) -> bool:
        self.reached = self.end is not None and time.monotonic() >= self.end
        return self.reached

    def now(self) -> None:
        """The step under way is the last."""
        self.end = time.monotonic()


@contextmanager
def time_limit(minutes: float | None) -> Iterator[TimeLimit]:
    """SIGTERM, with which clusters announce the end of a job, ends the time too: a checkpoint follows. Signals reach
    only the main thread; a run in another one has the clock alone."""
    limit = TimeLimit(minutes)
    if threading.current_thread() is not threading.main_thread():
        yield limit
        return

    def over(number: int, frame: FrameType | None) -> None:
        limit.now()

    before = signal.signal(signal.SIGTERM, over)
    try:
        yield limit
    finally:
        signal.signal(signal.SIGTERM, before)
