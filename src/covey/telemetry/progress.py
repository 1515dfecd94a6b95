"""Lines that show life where nothing is printed for a while: what is being done, how far it is, and for how long.

    loading smollm2-135m ...
    evaluating before training ...
    evaluating before training: 40 of 200 answers, 12s

For pipes, files and batch jobs; a terminal has the live view.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from covey.telemetry.figures import duration

SOON = 2.0  # seconds after which work that goes on is announced; what is quicker needs no line
HEARTBEAT_SECONDS = 10.0  # seconds between two lines about it
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
        return self._now() - self._last >= HEARTBEAT_SECONDS


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


# -- How far a long piece of work is and when it will be done: a bar on a terminal, a line every few seconds elsewhere--

EVERY = 5.0  # seconds between two lines


class Pace:
    """Counts what is done. What was done before it began (`done`) says nothing about how long the rest will take."""

    def __init__(self, total: int, done: int, now: Callable[[], float]) -> None:
        self.total, self.done = total, done
        self.tokens = 0
        self._before, self._now, self._start = done, now, now()

    @property
    def seconds(self) -> float:
        return self._now() - self._start

    def begin(self) -> None:
        """The work begins now: what came before, a model that was loaded, is no measure of it."""
        if self.done == self._before:
            self._start = self._now()

    def eta(self) -> float | None:
        fresh = self.done - self._before
        return self.seconds / fresh * (self.total - self.done) if fresh else None

    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class ProgressLine:
    """`advance` says that so many more are done; `what` is what is being worked on."""

    def __init__(
        self,
        total: int,
        done: int = 0,
        *,
        unit: str,
        file: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pace = Pace(total, done, now)
        self._unit, self._file, self._now = unit, file or sys.stderr, now
        self._last = now()
        self._bar: Progress | None = None
        console = Console(file=self._file)
        if self._file.isatty() and not console.is_dumb_terminal:
            columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> ProgressLine:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int, tokens: int, what: str) -> None:
        self.pace.done += count
        self.pace.tokens += tokens
        if self._bar is not None:
            self._bar.update(self._task, completed=self.pace.done, description=self._line(what))
        elif self._now() - self._last >= EVERY or self.pace.done == self.pace.total:
            self._last = self._now()
            with suppress(OSError):  # who reads has gone: the work goes on
                print(self._line(what), file=self._file, flush=True)

    def _line(self, what: str) -> str:
        pace = self.pace
        left = f"eta {duration(pace.eta())}" if pace.done < pace.total else f"took {duration(pace.seconds)}"
        return f"{what}  {pace.done}/{pace.total} {self._unit}  {pace.speed():.0f} tok/s  {left}"
