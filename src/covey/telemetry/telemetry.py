"""Wall time per stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from covey.config.schema import LoggingConfig
from covey.memory import memory_metrics
from covey.redact import hide
from covey.telemetry.base import EpisodeView, RunInfo, Sink, require
from covey.telemetry.console import open_console
from covey.telemetry.history import History, read_history
from covey.telemetry.jsonl import JsonlFiles
from covey.telemetry.trackers import MlflowSink, TensorboardSink, TrackioSink, WandbSink


class StageClock:
    """Adds up the seconds of each stage until they are taken. A stage inside a stage belongs to the outer one, so
    that the stages of a step add up to its time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._running: list[str] = []
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    @property
    def current(self) -> str | None:
        return self._running[-1] if self._running else None

    def enter(self, name: str) -> None:
        if not self._running:
            self._since = self._now()
        self._running.append(name)

    def leave(self) -> None:
        self._charge()
        self._running.pop()

    def take(self, *, evaluation: bool) -> dict[str, float]:
        """Seconds since they were last taken: those of evaluation, or those of everything else."""
        self._charge()
        names = [name for name in self._seconds if (name == "evaluate") == evaluation]
        return {name: self._seconds.pop(name) for name in names}

    def _charge(self) -> None:
        if not self._running:
            return
        now = self._now()
        outer = self._running[0]
        self._seconds[outer] = self._seconds.get(outer, 0.0) + now - self._since
        self._since = now


# -- The one thing the loop talks to: it measures the stages and passes everything on to the sinks ---------------------
# with telemetry.stage("rollout"):
# telemetry.progress(37, 64, "episodes")
# ...
# telemetry.step(index, metrics, sample, episodes)

STATUSES = ("finished", "interrupted", "failed", "restarting")
MODULES = {"wandb": "wandb", "tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "trackio": "trackio"}


class Telemetry:
    def __init__(
        self,
        files: JsonlFiles,
        sinks: Sequence[Sink] = (),
        now: Callable[[], float] = time.perf_counter,
        memory: Callable[[], Mapping[str, float]] = dict,
        ahead: bool = False,  # sampling goes on while the learner learns
    ) -> None:
        self._files = files
        self._sinks: tuple[Sink, ...] = (files, *sinks)
        self._clock = StageClock(now)
        self._memory = memory
        self._ahead = ahead
        self._closed = False

    @classmethod
    def open(
        cls, info: RunInfo, logging: LoggingConfig, *, metrics_offset: int | None, episodes_offset: int | None
    ) -> Telemetry:
        """Start the record of a run, or continue it from a checkpoint's offsets. Close it in a `finally`."""
        check_logging(logging)
        files = JsonlFiles(info.folder, metrics_offset, episodes_offset)
        history = read_history(info.folder) if metrics_offset else History()
        sinks: list[Sink] = []
        if "wandb" in logging.to:
            sinks.append(WandbSink(info, logging))
        if "tensorboard" in logging.to:
            sinks.append(TensorboardSink(info, history))
        if "mlflow" in logging.to:
            sinks.append(MlflowSink(info, logging))
        if "trackio" in logging.to:
            sinks.append(TrackioSink(info, logging))
        if "console" in logging.to:  # last: what the others print while starting stays above the live view
            sinks.append(open_console(info, logging.verbosity, history))
        ahead = info.config.get("mode", {}).get("name") == "async"
        return cls(files, sinks, memory=memory_metrics, ahead=ahead)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the block as `timing/{name}`. Evaluation's time goes to its own record, all else to the step's."""
        self._clock.enter(name)
        self._announce()
        try:
            yield
        finally:
            self._clock.leave()
            self._announce()

    def progress(self, done: int, total: int, what: str) -> None:
        self._tell(lambda sink: sink.progress(done, total, what))

    def step(
        self,
        index: int,
        metrics: Mapping[str, float],
        sample: EpisodeView | None,
        episodes: Sequence[Mapping[str, Any]],
    ) -> None:
        """After each training step; `index` counts from 0."""
        self.record(index, self.measure(metrics), sample, episodes)

    def measure(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics of a step with its times and memory. To be called once a step: the clocks start anew."""
        seconds = self._clock.take(evaluation=False)
        timing = {f"timing/{name}": value for name, value in seconds.items()}
        whole = sum(seconds.values())
        if seconds:
            timing["timing/step"] = whole
        if "rollout" in seconds:
            timing["timing/generation_time"] = seconds["rollout"]  # the name that others log it by
        tokens = metrics.get("perf/generated_tokens")
        if self._ahead and tokens is not None and whole:
            # `rollout` is only what the learner waited, and a step's tokens may all have been sampled before it.
            timing["perf/tokens_per_second"] = tokens / whole
        elif tokens and seconds.get("rollout"):
            timing["perf/tokens_per_second"] = tokens / seconds["rollout"]
        if (tokens := metrics.get("perf/read_tokens")) and seconds.get("update"):
            timing["perf/tokens_per_second"] = tokens / seconds["update"]
        return {**timing, **self._memory(), **metrics}

    def record(
        self,
        index: int,
        measured: Mapping[str, float],
        sample: EpisodeView | None,
        episodes: Sequence[Mapping[str, Any]],
    ) -> None:
        """A step whose times were measured already."""
        self._tell(lambda sink: sink.step(index, measured, sample, episodes))

    def evaluation(self, step: int, metrics: Mapping[str, float], sample: EpisodeView | None) -> None:
        """After each evaluation; `step` is the number of updates done. After the end of the run nothing is recorded."""
        if self._closed:
            return
        timing = {f"timing/{name}": value for name, value in self._clock.take(evaluation=True).items()}
        self._tell(lambda sink: sink.evaluation(step, {**metrics, **timing}, sample))

    def note(self, text: str) -> None:
        text = hide(text)
        self._tell(lambda sink: sink.note(text))

    def warn(self, text: str) -> None:
        text = hide(text)
        self._tell(lambda sink: sink.warn(text))

    def offsets(self) -> tuple[int, int]:
        """Byte offsets of metrics.jsonl and episodes.jsonl, synced to the disk: what a checkpoint must remember."""
        return self._files.offsets()

    def close(self, status: str) -> None:
        """With one of `STATUSES`. Closing twice is closing once."""
        assert status in STATUSES, f"unknown status {status}"
        if self._closed:
            return
        self._closed = True
        self._sinks = self._sinks[::-1]  # the console first: the terminal is given back whatever follows
        self._tell(lambda sink: sink.close(status))

    def _announce(self) -> None:
        self._tell(lambda sink: sink.stage(self._clock.current))

    def _tell(self, call: Callable[[Sink], None]) -> None:
        """Each sink in turn. The files have everything: a run does not end because a service elsewhere is down."""
        for sink in self._sinks:
            try:
                call(sink)
            except Exception as error:
                if not sink.elsewhere:
                    raise
                self._sinks = tuple(other for other in self._sinks if other is not sink)
                self.warn(f"{type(sink).__name__} broke down and gets nothing more of this run: {error!r}")


def check_logging(logging: LoggingConfig) -> None:
    """Refuse a logger whose package is missing, before anything is started."""
    for extra, module in MODULES.items():
        if extra in logging.to:
            require(module, extra)
