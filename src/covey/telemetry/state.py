"""What both consoles know of a run: where it stands, what it measured, and how long it will take."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from covey.telemetry.base import EpisodeView, RunInfo
from covey.telemetry.figures import curve_of, is_stage, key_figures
from covey.telemetry.history import History, Points

RECENT = 20  # steps that the pace is taken from
COURSE = 64  # newest values kept of each figure: more than its course on the screen shows
MOST = 4096  # points kept of the curve, evenly over the run: many more than a screen has columns


class RunState:
    def __init__(self, info: RunInfo, history: History | None = None) -> None:
        self.info = info
        self.figures = key_figures(info)
        self.curve = curve_of(info.kind, info.trained_reward)
        self.done = info.first_step
        self.metrics: dict[str, float] = {}  # newest value of each, of steps and evaluations together
        self.series = {row.key: deque[float](maxlen=COURSE) for rows in self.figures for row in rows}
        self.training: Points = []  # of the curve: of every `_spacing`th step
        self._spacing = 1
        self.evaluations: dict[str, Points] = {mode: [] for mode in self.curve.evaluations}
        self.timings: deque[dict[str, float]] = deque(maxlen=RECENT)
        self.sample: EpisodeView | None = None
        self.sample_from = ""
        self.warnings: list[str] = []
        history = history or History()
        for record in history.steps:
            self.add_step(record.step, record.metrics, None)
        for record in history.evaluations:
            self.add_evaluation(record.step, record.metrics, None)

    def add_step(self, index: int, metrics: Mapping[str, float], sample: EpisodeView | None) -> None:
        self.done = index + 1
        self._add(metrics)
        if self.curve.key in metrics and index % self._spacing == 0:
            self._add_point(index, metrics[self.curve.key])
        if "timing/step" in metrics:
            self.timings.append({key: value for key, value in metrics.items() if key.startswith("timing/")})
        if sample is not None:
            self.sample, self.sample_from = sample, f"step {self.done}"

    def add_evaluation(self, step: int, metrics: Mapping[str, float], sample: EpisodeView | None) -> None:
        self._add(metrics)
        for mode, key in self.curve.evaluations.items():
            if key in metrics:
                self.evaluations[mode].append((step, metrics[key]))
        if sample is not None:
            self.sample, self.sample_from = sample, "the evaluation"

    def eta(self) -> float | None:
        """Seconds left at the median pace, which one slow step does not upset; None before the first step."""
        paces = [seconds["timing/step"] for seconds in self.timings]
        return median(paces) * (self.info.total_steps - self.done) if paces else None

    def stage_seconds(self) -> dict[str, float]:
        """Mean seconds per step of each stage, over the recent steps; longest first."""
        totals: dict[str, float] = {}
        for seconds in self.timings:
            for key, value in seconds.items():
                if is_stage(key):
                    name = key.removeprefix("timing/")
                    totals[name] = totals.get(name, 0.0) + value / len(self.timings)
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def _add_point(self, index: int, value: float) -> None:
        self.training.append((index, value))
        if len(self.training) > MOST:
            self._spacing *= 2
            self.training = [point for point in self.training if point[0] % self._spacing == 0]

    def _add(self, metrics: Mapping[str, float]) -> None:
        self.metrics.update(metrics)
        for key, values in self.series.items():
            if key in metrics:
                values.append(metrics[key])
