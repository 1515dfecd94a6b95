"""The training loop's interface to telemetry.

    with telemetry.stage("rollout"):
        telemetry.progress(37, 64, "episodes")
    telemetry.step(index, metrics, sample, episodes)

It measures the wall time of each stage and forwards every event to the sinks: files, trackers and console.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from covey.config.schema import LoggingConfig
from covey.memory import memory_metrics
from covey.redact import hide
from covey.telemetry.base import EpisodeRecords, EpisodeView, Metrics, RunInfo, Sink
from covey.telemetry.console import open_console
from covey.telemetry.history import History, read_history
from covey.telemetry.jsonl import JsonlFiles
from covey.telemetry.trackers import TRACKERS, import_tracker, open_trackers

STATUSES = ("finished", "interrupted", "failed", "restarting")


class StageClock:
    """Accumulates the seconds of each stage until they are taken.

    A nested stage counts towards the outer one, so the stages of a step add up to its time.
    """

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
        """Seconds since the last call: of the evaluation stage, or of all other stages."""
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


class Telemetry:
    def __init__(
        self,
        files: JsonlFiles,
        sinks: Sequence[Sink] = (),
        now: Callable[[], float] = time.perf_counter,
        memory: Callable[[], Mapping[str, float]] = dict,
        asynchronous: bool = False,  # sampling overlaps with learning
    ) -> None:
        self._files = files
        self._sinks: tuple[Sink, ...] = (files, *sinks)
        self._clock = StageClock(now)
        self._memory = memory
        self._asynchronous = asynchronous
        self._closed = False

    @classmethod
    def open(
        cls, info: RunInfo, logging: LoggingConfig, *, metrics_offset: int | None, episodes_offset: int | None
    ) -> Telemetry:
        """Start the record of a run, or continue it from a checkpoint's offsets. Close it in a `finally`."""
        check_logging(logging)
        files = JsonlFiles(info.folder, metrics_offset, episodes_offset)
        history = read_history(info.folder) if metrics_offset else History()
        sinks: list[Sink] = [*open_trackers(info, logging, history)]
        if "console" in logging.to:  # last, so that start-up output of the trackers stays above the live view
            sinks.append(open_console(info, logging.verbosity, history))
        asynchronous = info.config.get("mode", {}).get("name") == "async"
        return cls(files, sinks, memory=memory_metrics, asynchronous=asynchronous)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record the seconds of the block as `timing/{name}`, with the next step or evaluation."""
        self._clock.enter(name)
        self._send(lambda sink: sink.stage(self._clock.current))
        try:
            yield
        finally:
            self._clock.leave()
            self._send(lambda sink: sink.stage(self._clock.current))

    def progress(self, done: int, total: int, what: str) -> None:
        self._send(lambda sink: sink.progress(done, total, what))

    def step(self, index: int, metrics: Metrics, sample: EpisodeView | None, episodes: EpisodeRecords) -> None:
        """Record a training step; `index` counts from 0."""
        self.record(index, self.measure(metrics), sample, episodes)

    def measure(self, metrics: Metrics) -> dict[str, float]:
        """The metrics of a step with its times and memory. Call it once per step: it resets the clocks."""
        seconds = self._clock.take(evaluation=False)
        timing = {f"timing/{name}": value for name, value in seconds.items()}
        whole = sum(seconds.values())
        if seconds:
            timing["timing/step"] = whole
        if "rollout" in seconds:
            timing["timing/generation_time"] = seconds["rollout"]  # the name that other libraries use
        tokens = metrics.get("perf/generated_tokens")
        if self._asynchronous and tokens is not None and whole:
            # `rollout` is only the learner's waiting time: the tokens may have been sampled before this step.
            timing["perf/tokens_per_second"] = tokens / whole
        elif tokens and seconds.get("rollout"):
            timing["perf/tokens_per_second"] = tokens / seconds["rollout"]
        if (tokens := metrics.get("perf/read_tokens")) and seconds.get("update"):
            timing["perf/tokens_per_second"] = tokens / seconds["update"]
        return {**timing, **self._memory(), **metrics}

    def record(self, index: int, measured: Metrics, sample: EpisodeView | None, episodes: EpisodeRecords) -> None:
        """Record a step whose metrics come from `measure`."""
        self._send(lambda sink: sink.step(index, measured, sample, episodes))

    def evaluation(self, step: int, metrics: Metrics, sample: EpisodeView | None) -> None:
        """Record an evaluation after `step` updates. Ignored after `close`."""
        if self._closed:
            return
        timing = {f"timing/{name}": value for name, value in self._clock.take(evaluation=True).items()}
        self._send(lambda sink: sink.evaluation(step, {**metrics, **timing}, sample))

    def note(self, text: str) -> None:
        text = hide(text)
        self._send(lambda sink: sink.note(text))

    def warn(self, text: str) -> None:
        text = hide(text)
        self._send(lambda sink: sink.warn(text))

    def offsets(self) -> tuple[int, int]:
        """Byte offsets of metrics.jsonl and episodes.jsonl, synced to disk, for a checkpoint to store."""
        return self._files.offsets()

    def close(self, status: str) -> None:
        """Close every sink with one of `STATUSES`. Closing twice has no further effect."""
        assert status in STATUSES, f"unknown status {status}"
        if self._closed:
            return
        self._closed = True
        self._sinks = self._sinks[::-1]  # the console first, so that the terminal is restored in any case
        self._send(lambda sink: sink.close(status))

    def _send(self, call: Callable[[Sink], None]) -> None:
        """Call every sink. An external one that fails is dropped with a warning: the files have everything."""
        for sink in self._sinks:
            try:
                call(sink)
            except Exception as error:
                if not sink.external:
                    raise
                self._sinks = tuple(other for other in self._sinks if other is not sink)
                self.warn(f"{type(sink).__name__} failed and receives nothing more from this run: {error!r}")


def check_logging(logging: LoggingConfig) -> None:
    """Raise an error if the package of a tracker is missing."""
    for name in TRACKERS:
        if name in logging.to:
            import_tracker(name)
