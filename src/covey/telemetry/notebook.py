"""The progress of a run in a notebook: one output of the cell, which is redrawn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from html import escape
from typing import Any

from covey.telemetry.figures import duration, show
from covey.telemetry.state import RunState

SECONDS = 0.25  # between two pictures, at least
BAR = 30  # characters


def notebook_display() -> Callable[..., Any] | None:
    """IPython's `display` where a kernel shows what it is given; None at a terminal and in scripts."""
    if "IPython" not in sys.modules:  # a notebook has imported it
        return None
    from IPython import get_ipython

    if getattr(get_ipython(), "kernel", None) is None:
        return None
    from IPython.display import display

    found: Callable[..., Any] = display
    return found


class NotebookView:
    """`display` makes the output once; later pictures replace it, whatever cell and thread they come from."""

    def __init__(self, state: RunState, display: Callable[..., Any], now: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._now = now
        self._stage = "starting"
        self._count = ""
        self._ended = False
        self._drawn = now()
        self._output = display(self._picture(), raw=True, display_id=True)

    def enter(self, stage: str | None) -> None:
        self._stage, self._count = stage or "", ""
        self._draw_in_time()

    def progress(self, done: int, total: int, what: str) -> None:
        self._count = f"{done} of {total} {what}"
        self._draw_in_time()

    def end(self, status: str) -> None:
        self._stage, self._count = status, ""
        self.draw()
        self._ended = True

    def draw(self) -> None:
        if not self._ended:
            self._drawn = self._now()
            self._output.update(self._picture(), raw=True)

    def _draw_in_time(self) -> None:
        if self._now() - self._drawn >= SECONDS:
            self.draw()

    def _picture(self) -> dict[str, str]:
        text = "\n".join(self._lines())
        return {"text/plain": text, "text/html": f"<pre>{escape(text)}</pre>"}

    def _lines(self) -> list[str]:
        state, curve = self._state, self._state.curve
        total = state.info.total_steps
        full = BAR * state.done // max(1, total)
        first = f"{'█' * full}{'░' * (BAR - full)}  step {state.done} of {total}"
        if state.done < total and state.eta() is not None:
            first += f", {duration(state.eta())} left"
        figures = {
            curve.name: show(state.metrics.get(curve.key), curve.form),
            "eval": show(state.metrics.get(curve.best), curve.form),
            "entropy": show(state.metrics.get("policy/entropy"), "number"),
            "grad": show(state.metrics.get("grad/norm"), "number"),
            "tok/s": show(state.metrics.get("perf/tokens_per_second"), "count"),
        }
        doing = f"{self._stage}  {self._count}".strip()
        return [first, "  ".join(f"{name} {value}" for name, value in figures.items()), doing]
