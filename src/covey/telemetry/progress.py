"""How far a long piece of work is and when it will be done: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from covey.telemetry.figures import duration

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
