"""Progress of long operations: a heartbeat for logs, and a progress line with an ETA.

A heartbeat reports what is running when nothing else has been printed for a while:

    loading smollm2-135m ...
    evaluating before training ...
    evaluating before training: 40 of 200 answers, 12s

It is for pipes, files and batch jobs; a terminal has the live view.
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

from covey.telemetry.key_metrics import format_duration

ANNOUNCE_SECONDS = 2.0  # work that takes longer is announced
HEARTBEAT_SECONDS = 10.0  # between two lines before the first step
STEADY_SECONDS = 60.0  # between two lines once steps are printed
TICK_SECONDS = 0.5  # between two checks of the clock
LINE_SECONDS = 5.0  # between two progress lines


class Heartbeat:
    """Prints a line when one is due. A thread calls `tick`; hold `lock` and call `line_printed` around other output."""

    def __init__(self, print_line: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self.lock = threading.RLock()
        self._print_line, self._now = print_line, now
        self._text: str | None = None
        self._progress = ""
        self._since = self._last = now()
        self._announced = False
        self._steady = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

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

    def line_printed(self) -> None:
        self._last = self._now()

    def steady(self) -> None:
        """Steps are printed from now on, so a heartbeat is due only when they take long."""
        self._steady = True

    def tick(self) -> None:
        with self.lock:
            if self._text is None or not self._due():
                return
            took = format_duration(self._now() - self._since)
            detailed = self._announced or self._steady
            self._print_line(f"{self._text}: {self._progress}{took}" if detailed else f"{self._text} ...")
            self._announced = True
            self.line_printed()

    def _due(self) -> bool:
        if self._steady:
            return self._now() - self._last >= STEADY_SECONDS
        if not self._announced:
            return self._now() - self._since >= ANNOUNCE_SECONDS
        return self._now() - self._last >= HEARTBEAT_SECONDS

    def start(self) -> None:
        """Call `tick` from a thread until `stop`."""
        if self._thread is None and not self._stopped.is_set():
            self._thread = threading.Thread(target=self._run, name="covey-heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(TICK_SECONDS):
            self.tick()


@contextmanager
def heartbeat(print_line: Callable[[str], None], text: str) -> Iterator[None]:
    """Print heartbeats while the block runs."""
    beat = Heartbeat(print_line)
    beat.begin(text)
    beat.start()
    try:
        yield
    finally:
        beat.stop()


class ProgressLine:
    """Progress with speed and ETA: a bar on a terminal, elsewhere a line every few seconds.

    `done` items were finished earlier; they do not count towards the speed.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        *,
        unit: str,
        file: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._done, self._done_before = total, done, done
        self._tokens = 0
        self._unit, self._file, self._now = unit, file or sys.stderr, now
        self._start = self._last = now()
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

    def start_clock(self) -> None:
        """Measure speed from now on, unless something was done already. Call it once a model is loaded."""
        if self._done == self._done_before:
            self._start = self._now()

    def advance(self, count: int, tokens: int, what: str) -> None:
        """`count` more items of `what` are done."""
        self._done += count
        self._tokens += tokens
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=self._line(what))
        elif self._now() - self._last >= LINE_SECONDS or self._done == self._total:
            self._last = self._now()
            with suppress(OSError):  # a closed pipe does not stop the work
                print(self._line(what), file=self._file, flush=True)

    def _line(self, what: str) -> str:
        seconds, fresh, missing = self._now() - self._start, self._done - self._done_before, self._total - self._done
        speed = self._tokens / seconds if seconds > 0 else 0.0
        eta = seconds / fresh * missing if fresh else None
        left = f"eta {format_duration(eta)}" if missing > 0 else f"took {format_duration(seconds)}"
        return f"{what}  {self._done}/{self._total} {self._unit}  {speed:.0f} tok/s  {left}"
