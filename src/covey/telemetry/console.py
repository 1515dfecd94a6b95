"""The console: a live view on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TextIO

from rich.console import Console, ConsoleRenderable
from rich.control import Control
from rich.live import Live

from covey.config.schema import LoggingConfig
from covey.telemetry.base import EpisodeView, RunInfo, Sink
from covey.telemetry.figures import duration, evaluation_form, show
from covey.telemetry.history import History, RunState
from covey.telemetry.live_view import WARNINGS, LiveView, NotebookView, notebook_display
from covey.telemetry.progress import Beating, Heartbeat, beating

DOING = {
    "rollout": "sampling",
    "annotate": "computing log-probs",
    "update": "updating the model",
    "publish": "sending the weights to the engine",
    "evaluate": "evaluating",
    "checkpoint": "saving a checkpoint",
}


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
    """A terminal that cannot show the characters or move its cursor gets plain lines, as a pipe does."""
    return sys.stdout.isatty() and not console.is_dumb_terminal and not console.options.ascii_only


@contextmanager
def working(text: str, logging: LoggingConfig) -> Iterator[None]:
    """Around what takes long before a run has a console: where that will be plain lines, so is this."""
    plain = "console" in logging.to and logging.verbosity != "warning" and not _can_redraw(Console(file=sys.stdout))
    with beating(partial(_write_line, sys.stdout), text) if plain else nullcontext():
        yield


class PlainConsole(Sink):
    """One line per step and per evaluation, for pipes, files and batch jobs: no colour, nothing overwritten. Where
    nothing is printed for a while, above all before the first step, lines say what is being done."""

    def __init__(self, state: RunState, file: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._file = file
        self.heartbeat = Heartbeat(self._print, now)
        self._beating = Beating(self.heartbeat)
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
        doing = DOING.get(name, name)
        self.heartbeat.begin(doing if self._stepped else self._at_first(name, doing))
        self._beating.start()

    def _at_first(self, name: str, doing: str) -> str:
        """What a stage does before the first step is done."""
        match name:
            case "evaluate":
                return f"{doing} before training"
            case "publish":  # which waits until vLLM has started
                vllm = self._state.info.config.get("rollout", {}).get("name") == "vllm"
                return "starting vLLM" if vllm else doing
        return f"first step: {doing}"

    def progress(self, done: int, total: int, what: str) -> None:
        self.heartbeat.progress(done, total, what)

    def step(
        self,
        index: int,
        metrics: Mapping[str, float],
        sample: EpisodeView | None,
        episodes: Sequence[Mapping[str, Any]],
    ) -> None:
        state, curve = self._state, self._state.curve
        state.add_step(index, metrics, None)
        self._stepped = True
        self.heartbeat.steady()
        speed = metrics.get("perf/tokens_per_second")
        self._print(
            f"step  {self._position(state.done)}",
            f"{curve.name} {show(metrics.get(curve.key), curve.form):>5}",
            f"eval {show(state.metrics.get(curve.best), curve.form):>5}",
            f"entropy {show(metrics.get('policy/entropy'), 'number'):>5}",
            f"grad {show(metrics.get('grad/norm'), 'number'):>5}",
            f"{show(speed, 'count'):>5} tok/s",
            f"eta {duration(state.eta())}",
        )

    def evaluation(self, step: int, metrics: Mapping[str, float], sample: EpisodeView | None) -> None:
        self._state.add_evaluation(step, metrics, None)
        scores = [
            f"{key.removeprefix('eval/')} {show(value, evaluation_form(key))}"
            for key, value in sorted(metrics.items())
            if key.startswith("eval/") and not key.endswith(("/length_mean", "/truncated"))
        ]
        seconds = metrics.get("timing/evaluate")
        took = [f"took {duration(seconds)}"] if seconds is not None else []
        self._print(f"eval  {self._position(step)}", *scores, *took)

    def note(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}")

    def close(self, status: str) -> None:
        self._beating.stop()
        self._print(f"{status} after {self._state.done} of {self._state.info.total_steps} steps")

    def _position(self, done: int) -> str:
        total = str(self._state.info.total_steps)
        return f"{done:>{len(total)}}/{total}"

    def _print(self, *parts: str) -> None:
        with self.heartbeat.lock:
            _write_line(self._file, "  ".join(parts))
            self.heartbeat.spoken()


class DebugConsole(PlainConsole):
    """`logging.verbosity=debug`: every stage as it starts, every figure, and one episode of each step."""

    def stage(self, name: str | None) -> None:
        super().stage(name)
        if name is not None:
            self._print(f"  {name} ...")

    def step(
        self,
        index: int,
        metrics: Mapping[str, float],
        sample: EpisodeView | None,
        episodes: Sequence[Mapping[str, Any]],
    ) -> None:
        super().step(index, metrics, sample, episodes)
        for name, value in sorted(metrics.items()):
            self._print(f"    {name:36} {value:.6g}")
        if sample is not None:
            self._print(f"    question {sample.question!r}  reply {sample.reply!r}  reward {sample.reward}")


class NotebookConsole(PlainConsole):
    """In a notebook: one output that is redrawn, in place of a line per step. Notes and warnings are lines."""

    def __init__(self, state: RunState, file: TextIO, display: Callable[..., Any]) -> None:
        super().__init__(state, file)
        self._view = NotebookView(state, display)

    def stage(self, name: str | None) -> None:
        self._view.enter(name)

    def progress(self, done: int, total: int, what: str) -> None:
        self._view.progress(done, total, what)

    def step(
        self,
        index: int,
        metrics: Mapping[str, float],
        sample: EpisodeView | None,
        episodes: Sequence[Mapping[str, Any]],
    ) -> None:
        self._state.add_step(index, metrics, sample)
        self._view.draw()

    def evaluation(self, step: int, metrics: Mapping[str, float], sample: EpisodeView | None) -> None:
        self._state.add_evaluation(step, metrics, sample)
        self._view.draw()

    def close(self, status: str) -> None:
        self._view.end(status)


class WarningsOnly(Sink):
    """`logging.verbosity=warning`: silence unless something is wrong."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def warn(self, text: str) -> None:
        _write_line(self._file, f"warning: {text}")


class Screen(Live):
    """Draws over its last picture, by going up as many lines as that had."""

    _drawn = 0  # columns of the last picture

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        width, before, self._drawn = self.console.width, self._drawn, self.console.width
        if width >= before or not self.console.is_terminal:
            return super().process_renderables(renderables)
        # A window that was made narrower has broken our lines into more than we know of: begin with an empty screen.
        self._live_render._shape = None
        return [Control.clear(), Control.home(), *super().process_renderables(renderables)]


class LiveConsole(Sink):
    """The live view. Its clock moves between events too: rich redraws it from a thread of its own."""

    def __init__(self, state: RunState, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self._view = LiveView(state, now)
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

    def step(
        self,
        index: int,
        metrics: Mapping[str, float],
        sample: EpisodeView | None,
        episodes: Sequence[Mapping[str, Any]],
    ) -> None:
        with self._view.lock:
            self._view.state.add_step(index, metrics, sample)

    def evaluation(self, step: int, metrics: Mapping[str, float], sample: EpisodeView | None) -> None:
        with self._view.lock:
            self._view.state.add_evaluation(step, metrics, sample)

    def note(self, text: str) -> None:
        with suppress(OSError):
            self._live.console.print(text, markup=False, highlight=False)

    def warn(self, text: str) -> None:
        with self._view.lock:
            self._view.state.warnings.append(text)
            over = self._view.status != "running"
        if over:  # the view is drawn no more
            self._print_warning(text)

    def close(self, status: str) -> None:
        with self._view.lock:
            self._view.status = status
        with suppress(OSError):
            self._live.stop()
        for text in self._view.state.warnings[:-WARNINGS]:  # the view kept only the last of them
            self._print_warning(text)

    def _print_warning(self, text: str) -> None:
        with suppress(OSError):
            self._live.console.print(f"warning: {text}", style="yellow", markup=False, highlight=False)


def _write_line(file: TextIO, line: str) -> None:
    """A terminal that went away, or one that lacks a character, must not end the run."""
    encoding = file.encoding or "utf-8"
    with suppress(OSError):
        file.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        file.flush()
