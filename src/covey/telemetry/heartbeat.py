"""Lines that show life where nothing is printed for a while: what is being done, how far it is, and for how long.

    loading smollm2-135m ...
    evaluating before training ...
    evaluating before training: 40 of 200 answers, 12s

For pipes, files and batch jobs; a terminal has the live view.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from covey.telemetry.figures import duration

SOON = 2.0  # seconds after which work that goes on is announced; what is quicker needs no line
EVERY = 10.0  # seconds between two lines about it
QUIET = 60.0  # the same once steps are printed
TICK = 0.5  # seconds between two looks at the clock


class Heartbeat:
    """Decides when a line is due. `tick` is called again and again, from a thread of its own; whoever prints other
    lines holds `lock` and calls `spoken`."""

    def __init__(self, say: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self.lock = threading.RLock()
        self._say, self._now = say, now
        self._text: str | None = None
        self._progress = ""
        self._since = self._last = now()
        self._announced = False
        self._steady = False

    def begin(self, text: str) -> None:
        with self.lock:
            self._text, self._progress, self._announced = text, "", False
            self._since = self._now()

    def end(self) -> None:
        with self.lock:
            self._text = None

    def progress(self, done: int, total: int, what: str) -> None:
        with self.lock:
            self._progress = f"{done} of {total} {what}, "

    def spoken(self) -> None:
        """Another line was printed."""
        self._last = self._now()

    def steady(self) -> None:
        """Steps are printed from now on: a line is due only where they take long."""
        self._steady = True

    def tick(self) -> None:
        with self.lock:
            if self._text is None or not self._due():
                return
            took = duration(self._now() - self._since)
            self._say(
                f"{self._text}: {self._progress}{took}" if self._announced or self._steady else f"{self._text} ..."
            )
            self._announced = True
            self.spoken()

    def _due(self) -> bool:
        if self._steady:
            return self._now() - self._last >= QUIET
        if not self._announced:
            return self._now() - self._since >= SOON
        return self._now() - self._last >= EVERY


class Beating:
    """Calls `tick` from a thread, from `start` to `stop`."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None and not self._over.is_set():
            self._thread = threading.Thread(target=self._run, name="covey-heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(TICK):
            self._heartbeat.tick()


@contextmanager
def beating(say: Callable[[str], None], text: str) -> Iterator[None]:
    """Show life during a block."""
    heartbeat = Heartbeat(say)
    heartbeat.begin(text)
    thread = Beating(heartbeat)
    thread.start()
    try:
        yield
    finally:
        thread.stop()
