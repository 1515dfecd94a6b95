"""The console of a run: a live view on a terminal, one redrawn output in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from html import escape
from typing import Any, TextIO

from rich.console import Console, ConsoleRenderable
from rich.control import Control
from rich.live import Live

from covey.config.schema import LoggingConfig
from covey.telemetry.base import EpisodeRecords, EpisodeView, Metrics, RunInfo, Sink
from covey.telemetry.history import History, RunState
from covey.telemetry.key_metrics import evaluation_format, format_duration, format_value
from covey.telemetry.progress import Heartbeat, heartbeat

STAGE_TEXT = {
    "rollout": "sampling",
    "annotate": "computing log-probs",
    "update": "updating the model",
    "publish": "sending the weights to the engine",
    "evaluate": "evaluating",
    "checkpoint": "saving a checkpoint",
}
NOTEBOOK_SECONDS = 0.25  # least time between two redraws in a notebook
NOTEBOOK_BAR = 30  # characters


def open_console(info: RunInfo, verbosity: str, history: History) -> Sink:
    state = RunState(info, history)
    if verbosity == "warning":
        return WarningsOnly(sys.stderr)
    if verbosity == "debug":
        return DebugConsole(state, sys.stdout)
    if (display := notebook_display()) is not None:
        return NotebookConsole(state, sys.stdout, display)
    console = Console(file=sys.stdout)
    return LiveConsole(state, console) if _can_redraw(console) else PlainConsole(state, sys.stdout)


def _can_redraw(console: Console) -> bool:
    """Whether stdout is a terminal that can move its cursor and show the characters of the live view."""
    return sys.stdout.isatty() and not console.is_dumb_terminal and not console.options.ascii_only


def notebook_display() -> Callable[..., Any] | None:
    """IPython's `display` in a notebook kernel; None at a terminal and in scripts."""
    if "IPython" not in sys.modules:  # a notebook has imported it
        return None
    from IPython import get_ipython

    if getattr(get_ipython(), "kernel", None) is None:
        return None
    from IPython.display import display

    function: Callable[..., Any] = display
    return function


@contextmanager
def report_activity(text: str, logging: LoggingConfig) -> Iterator[None]:
    """Print heartbeats around long work before a run has its console, if that console will print plain lines."""
    plain = "console" in logging.to and logging.verbosity != "warning" and not _can_redraw(Console(file=sys.stdout))
    with heartbeat(partial(_write_line, sys.stdout), text) if plain else nullcontext():
        yield


class PlainConsole(Sink):
    """One line per step and per evaluation, without colour, for pipes, files and batch jobs.

    A heartbeat reports stages that take long, above all before the first step.
    """

    def __init__(self, state: RunState, file: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._file = file
        self.heartbeat = Heartbeat(self._print, now)
        self._stepped = False
        info = state.info
        what = f"{info.algorithm} trains {info.model} on {info.task}{info.scored_by}"
        self._print(f"{info.title}: {what}, {info.total_steps} steps")
        self._print(f"writing to {info.folder}")
        if info.first_step:
            self._print(f"continuing after step {info.first_step}")

    def stage(self, name: str | None) -> None:
        if name is None:
            self.heartbeat.end()
            return
        text = STAGE_TEXT.get(name, name)
        self.heartbeat.begin(text if self._stepped else self._before_first_step(name, text))
        self.heartbeat.start()

    def _before_first_step(self, name: str, text: str) -> str:
        if name == "evaluate":
            return f"{text} before training"
        if name == "publish":  # the first one waits until vLLM has started
            vllm = self._state.info.config.get("rollout", {}).get("name") == "vllm"
            return "starting vLLM" if vllm else text
        return f"first step: {text}"

    def progress(self, done: int, total: int, what: str) -> None:
        self.heartbeat.progress(done, total, what)

    def step(self, index: int, metrics: Metrics, sample: EpisodeView | None, episodes: EpisodeRecords) -> None:
        self._state.add_step(index, metrics, None)
        self._stepped = True
        self.heartbeat.steady()
        values = self._state.headline(metrics)
        speed = values.pop("tok/s")
        self._print(
            f"step  {self._position(self._state.done)}",
            *(f"{name} {value:>5}" for name, value in values.items()),
            f"{speed:>5} tok/s",
            f"eta {format_duration(self._state.eta())}",
        )

    def evaluation(self, step: int, metrics: Metrics, sample: EpisodeView | None) -> None:
        self._state.add_evaluation(step, metrics, None)
        scores = [
            f"{key.removeprefix('eval/')} {format_value(value, evaluation_format(key))}"
            for key, value in sorted(metrics.items())
            if key.startswith("eval/") and not key.endswith(("/length_mean", "/truncated"))
        ]
        seconds = metrics.get("timing/evaluate")
        took = [f"took {format_duration(seconds)}"] if seconds is not None else []
        self._print(f"eval  {self._position(step)}", *scores, *took)

    def note(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}")

    def close(self, status: str) -> None:
        self.heartbeat.stop()
        self._print(f"{status} after {self._state.done} of {self._state.info.total_steps} steps")

    def _position(self, done: int) -> str:
        total = str(self._state.info.total_steps)
        return f"{done:>{len(total)}}/{total}"

    def _print(self, *parts: str) -> None:
        with self.heartbeat.lock:
            _write_line(self._file, "  ".join(parts))
            self.heartbeat.line_printed()


class DebugConsole(PlainConsole):
    """`logging.verbosity=debug`: every stage as it starts, every metric, and one episode per step."""

    def stage(self, name: str | None) -> None:
        super().stage(name)
        if name is not None:
            self._print(f"  {name} ...")

    def step(self, index: int, metrics: Metrics, sample: EpisodeView | None, episodes: EpisodeRecords) -> None:
        super().step(index, metrics, sample, episodes)
        for name, value in sorted(metrics.items()):
            self._print(f"    {name:36} {value:.6g}")
        if sample is not None:
            self._print(f"    question {sample.question!r}  reply {sample.reply!r}  reward {sample.reward}")


class NotebookConsole(PlainConsole):
    """One output that is redrawn, instead of a line per step. Notes and warnings stay lines.

    `display` creates the output once; updates replace it, whichever cell or thread they come from.
    """

    def __init__(
        self,
        state: RunState,
        file: TextIO,
        display: Callable[..., Any],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(state, file)
        self._now = now
        self._stage = self._activity = "starting"
        self._closed = False
        self._drawn = now()
        self._output = display(self._picture(), raw=True, display_id=True)

    def stage(self, name: str | None) -> None:
        self._stage = self._activity = name or ""
        self._draw_if_due()

    def progress(self, done: int, total: int, what: str) -> None:
        self._activity = f"{self._stage}  {done} of {total} {what}".strip()
        self._draw_if_due()

    def step(self, index: int, metrics: Metrics, sample: EpisodeView | None, episodes: EpisodeRecords) -> None:
        self._state.add_step(index, metrics, sample)
        self._draw()

    def evaluation(self, step: int, metrics: Metrics, sample: EpisodeView | None) -> None:
        self._state.add_evaluation(step, metrics, sample)
        self._draw()

    def close(self, status: str) -> None:
        self._activity = status
        self._draw()
        self._closed = True

    def _draw(self) -> None:
        if not self._closed:
            self._drawn = self._now()
            self._output.update(self._picture(), raw=True)

    def _draw_if_due(self) -> None:
        if self._now() - self._drawn >= NOTEBOOK_SECONDS:
            self._draw()

    def _picture(self) -> dict[str, str]:
        state, total, eta = self._state, self._state.info.total_steps, self._state.eta()
        full = NOTEBOOK_BAR * state.done // max(1, total)
        bar = f"{'█' * full}{'░' * (NOTEBOOK_BAR - full)}  step {state.done} of {total}"
        if state.done < total and eta is not None:
            bar += f", {format_duration(eta)} left"
        values = "  ".join(f"{name} {value}" for name, value in state.headline(state.metrics).items())
        text = "\n".join((bar, values, self._activity))
        return {"text/plain": text, "text/html": f"<pre>{escape(text)}</pre>"}


class WarningsOnly(Sink):
    """`logging.verbosity=warning`: prints nothing but warnings."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def warn(self, text: str) -> None:
        _write_line(self._file, f"warning: {text}")


class Screen(Live):
    """rich's Live, which redraws by moving the cursor up by the lines it has drawn, made safe for resizing."""

    _drawn_width = 0

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        width, before, self._drawn_width = self.console.width, self._drawn_width, self.console.width
        if width >= before or not self.console.is_terminal:
            return super().process_renderables(renderables)
        # A narrower window has wrapped our lines, so their number is unknown: clear the screen.
        self._live_render._shape = None
        return [Control.clear(), Control.home(), *super().process_renderables(renderables)]


class LiveConsole(Sink):
    """The live view. rich redraws it in a separate thread, so its clock also moves between events."""

    def __init__(self, state: RunState, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        from covey.telemetry.live_view import MAX_WARNINGS, LiveView

        self._view, self._max_warnings = LiveView(state, now), MAX_WARNINGS
        self._live = Screen(self._view, console=console, refresh_per_second=4, vertical_overflow="crop")
        self._live.start()
        if state.info.first_step:
            self.note(f"continuing after step {state.info.first_step}")

    def stage(self, name: str | None) -> None:
        with self._view.lock:
            self._view.enter(name)

    def progress(self, done: int, total: int, what: str) -> None:
        with self._view.lock:
            self._view.progress = (done, total, what)

    def step(self, index: int, metrics: Metrics, sample: EpisodeView | None, episodes: EpisodeRecords) -> None:
        with self._view.lock:
            self._view.state.add_step(index, metrics, sample)

    def evaluation(self, step: int, metrics: Metrics, sample: EpisodeView | None) -> None:
        with self._view.lock:
            self._view.state.add_evaluation(step, metrics, sample)

    def note(self, text: str) -> None:
        with suppress(OSError):
            self._live.console.print(text, markup=False, highlight=False)

    def warn(self, text: str) -> None:
        with self._view.lock:
            self._view.state.warnings.append(text)
            closed = self._view.status != "running"
        if closed:  # the view is no longer redrawn
            self._print_warning(text)

    def close(self, status: str) -> None:
        with self._view.lock:
            self._view.status = status
        with suppress(OSError):
            self._live.stop()
        for text in self._view.state.warnings[: -self._max_warnings]:  # warnings that the view no longer shows
            self._print_warning(text)

    def _print_warning(self, text: str) -> None:
        with suppress(OSError):
            self._live.console.print(f"warning: {text}", style="yellow", markup=False, highlight=False)


def _write_line(file: TextIO, line: str) -> None:
    """Write a line. A closed terminal or an encoding without a character does not end the run."""
    encoding = file.encoding or "utf-8"
    with suppress(OSError):
        file.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        file.flush()
