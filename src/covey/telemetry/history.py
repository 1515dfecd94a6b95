"""Reads the state of a run from its folder: metrics history, run.json, totals in summary.json, and labels.

`RunState` holds the same information for the consoles of a live run.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from covey.config.schema import LoggingConfig, check_tags
from covey.errors import InputError
from covey.redact import hide_known
from covey.storage import is_locked, write_atomically
from covey.telemetry.base import EpisodeView, Metrics, RunInfo
from covey.telemetry.jsonl import METRICS_FILE, read_record
from covey.telemetry.key_metrics import curve_of, format_value, is_stage, key_metrics

SUMMARY_FILE, LABELS_FILE = "summary.json", "labels.json"
KILLED = "killed"  # the status of a run whose process ended without writing another one
RECENT_STEPS = 20  # steps that the pace is estimated from
SPARKLINE_VALUES = 64  # newest values kept of each key metric
MAX_POINTS = 4096  # points kept of the curve, evenly spaced over the run
MAX_LABELS_BYTES = 1 << 20  # a larger labels.json was not written by us

# Fields that every run.json has, and that are read from it.
RUN_FIELDS: dict[str, type] = {
    **dict.fromkeys(("status", "title", "algorithm", "model", "task", "trained_reward"), str),
    **{"reward_names": list, "total_steps": int},
}

Points = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Record:
    """One line of metrics.jsonl, without its non-finite values."""

    step: int
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class History:
    """metrics.jsonl, read back."""

    steps: tuple[Record, ...] = ()  # step: index of the training step, from 0
    evaluations: tuple[Record, ...] = ()  # step: number of updates done

    def training(self, key: str) -> Points:
        return [(record.step, record.metrics[key]) for record in self.steps if key in record.metrics]

    def evaluated(self, key: str) -> Points:
        return [(record.step, record.metrics[key]) for record in self.evaluations if key in record.metrics]

    def total(self, key: str) -> float:
        """Sum over all records of both kinds."""
        return sum(record.metrics.get(key, 0.0) for record in (*self.steps, *self.evaluations))

    def names(self) -> list[str]:
        """Every metric, sorted."""
        return sorted({key for record in (*self.steps, *self.evaluations) for key in record.metrics})


def read_history(folder: Path) -> History:
    path = folder / METRICS_FILE
    if not path.exists():
        raise InputError(f"{path}: no such file; is {folder} the folder of a run?")
    records: dict[str, list[Record]] = {"step": [], "eval": []}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):  # an incomplete last line
                break
            try:
                kind, step, metrics = read_record(line)
            except ValueError as error:  # a damaged line must not prevent a resume
                warnings.warn(f"{path}, line {number} is damaged and skipped: {error}", stacklevel=2)
                continue
            records[kind].append(Record(step, {key: value for key, value in metrics.items() if value is not None}))
    return History(tuple(records["step"]), tuple(records["eval"]))


def read_run(folder: Path) -> dict[str, Any]:
    """run.json with the current tags and notes. The status is `killed` if it says running but the lock is free."""
    path = folder / "run.json"
    try:
        if not path.exists():
            raise InputError(f"{path}: no such file; is {folder} the folder of a run?")
        run = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(run, ensure_ascii=False).encode()  # lone surrogates cannot be displayed
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a run.json of covey ({error})") from None
    except OSError as error:
        raise InputError(f"{str(path)[:200]}: cannot be read ({error.strerror})") from None
    for name, kind in RUN_FIELDS.items():
        if not isinstance(run, dict) or not isinstance(run.get(name), kind):
            value = run.get(name) if isinstance(run, dict) else run
            raise InputError(f"{path}: not a run.json of covey: {name} must be {kind.__name__}, not {value!r:.40}")
    if run["status"] == "running" and is_locked(folder) is False:
        run["status"] = KILLED
    labelled: dict[str, Any] = run | read_labels(folder, run)
    return labelled


class RunState:
    """The state of a live run for its console: progress, recent metrics and timings, the curve, one sample."""

    def __init__(self, info: RunInfo, history: History | None = None) -> None:
        self.info = info
        self.key_metrics = key_metrics(info)
        self.curve = curve_of(info.kind, info.trained_reward)
        self.done = info.first_step
        self.metrics: dict[str, float] = {}  # newest value of each metric of steps and evaluations
        self.series = {m.key: deque[float](maxlen=SPARKLINE_VALUES) for row in self.key_metrics for m in row}
        self.training: Points = []  # the curve, at every `_spacing`th step
        self._spacing = 1
        self.evaluations: dict[str, Points] = {mode: [] for mode in self.curve.evaluations}
        self.timings: deque[dict[str, float]] = deque(maxlen=RECENT_STEPS)
        self.sample: EpisodeView | None = None
        self.sample_from = ""
        self.warnings: list[str] = []
        history = history or History()
        for record in history.steps:
            self.add_step(record.step, record.metrics, None)
        for record in history.evaluations:
            self.add_evaluation(record.step, record.metrics, None)

    def add_step(self, index: int, metrics: Metrics, sample: EpisodeView | None) -> None:
        self.done = index + 1
        self._add(metrics)
        if self.curve.key in metrics and index % self._spacing == 0:
            self.training.append((index, metrics[self.curve.key]))
            if len(self.training) > MAX_POINTS:
                self._spacing *= 2
                self.training = [point for point in self.training if point[0] % self._spacing == 0]
        if "timing/step" in metrics:
            self.timings.append({key: value for key, value in metrics.items() if key.startswith("timing/")})
        if sample is not None:
            self.sample, self.sample_from = sample, f"step {self.done}"

    def add_evaluation(self, step: int, metrics: Metrics, sample: EpisodeView | None) -> None:
        self._add(metrics)
        for mode, key in self.curve.evaluations.items():
            if key in metrics:
                self.evaluations[mode].append((step, metrics[key]))
        if sample is not None:
            self.sample, self.sample_from = sample, "the evaluation"

    def headline(self, metrics: Metrics) -> dict[str, str]:
        """The few values that plain consoles print: of `metrics`, and the newest evaluation."""
        return {
            self.curve.name: format_value(metrics.get(self.curve.key), self.curve.format),
            "eval": format_value(self.metrics.get(self.curve.best), self.curve.format),
            "entropy": format_value(metrics.get("policy/entropy"), "number"),
            "grad": format_value(metrics.get("grad/norm"), "number"),
            "tok/s": format_value(metrics.get("perf/tokens_per_second"), "count"),
        }

    def eta(self) -> float | None:
        """Seconds left at the median pace, which is robust to a slow step; None before the first step."""
        paces = [seconds["timing/step"] for seconds in self.timings]
        return median(paces) * (self.info.total_steps - self.done) if paces else None

    def stage_seconds(self) -> dict[str, float]:
        """Mean seconds of each stage over the recent steps, longest first."""
        totals: dict[str, float] = {}
        for seconds in self.timings:
            for key, value in seconds.items():
                if is_stage(key):
                    name = key.removeprefix("timing/")
                    totals[name] = totals.get(name, 0.0) + value / len(self.timings)
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def _add(self, metrics: Metrics) -> None:
        self.metrics.update(metrics)
        for key, values in self.series.items():
            if key in metrics:
                values.append(metrics[key])


# -- Totals ------------------------------------------------------------------------------------------------------------

# A step record as runs write it, recognised by its two ends: ten times faster than parsing it.
_STEP = re.compile(rb'\{"kind": "step", "step": \d{1,15}, "metrics": \{"')
_SECONDS = re.compile(rb'"timing/step": (-?\d+\.?\d*(?:[eE][-+]?\d+)?)')


@dataclass
class Totals:
    """Steps, seconds and evaluations of a run, for tables of many runs.

    A finished run keeps them in summary.json with the size of metrics.jsonl, which need not be read again while its
    size is the same.
    """

    key: str  # the metric that selects the best evaluation
    size: int = 0  # bytes of metrics.jsonl counted so far
    steps: int = 0
    seconds: float = 0.0
    recent: list[float] = field(default_factory=list)  # seconds of the last steps
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # updates done, value of `key`
    broken: int = 0  # lines that are not records

    def add(self, line: bytes) -> None:
        """Count a complete line of metrics.jsonl."""
        self.size += len(line)
        if _STEP.match(line) and line.endswith(b"}}\n"):
            match = _SECONDS.search(line)
            self._add_step(float(match[1]) if match else None)
            return
        try:
            kind, step, metrics = read_record(line)
        except ValueError:
            self.broken += 1
            return
        if kind == "step":
            self._add_step(metrics.get("timing/step"))
        else:
            self.seconds += metrics.get("timing/evaluate") or 0.0
            if (value := metrics.get(self.key)) is not None:
                self.evaluations.append((step, value))

    @property
    def pace(self) -> float | None:
        """Median seconds of the recent steps."""
        return median(self.recent) if self.recent else None

    def _add_step(self, seconds: float | None) -> None:
        self.steps += 1
        if seconds is not None:
            self.seconds += seconds
            self.recent = [*self.recent[1 - RECENT_STEPS :], seconds]


def best_metric(run: Mapping[str, Any]) -> str:
    """The metric that selects the best evaluation of the run with this run.json."""
    return curve_of(run.get("kind", "rl"), run["trained_reward"]).best


def write_totals(folder: Path, run: Mapping[str, Any]) -> None:
    totals = Totals(best_metric(run))
    with (folder / METRICS_FILE).open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                totals.add(line)
    write_atomically(folder / SUMMARY_FILE, json.dumps(asdict(totals), indent=1))


def read_totals(folder: Path, key: str) -> Totals | None:
    """The totals in summary.json; None if the file is missing, damaged, or older than metrics.jsonl."""
    path = folder / SUMMARY_FILE
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        metrics = (folder / METRICS_FILE).stat()
        if metrics.st_mtime_ns > path.stat().st_mtime_ns:
            return None
        data = json.loads(path.read_text(encoding="utf-8"))
        points = [(int(step), float(value)) for step, value in data["evaluations"]]
        recent = [float(seconds) for seconds in data["recent"][-RECENT_STEPS:]]
        counts = {name: int(data[name]) for name in ("size", "steps", "broken")}
        totals = Totals(key, **counts, seconds=float(data["seconds"]), recent=recent, evaluations=points)
        return totals if (data["key"], totals.size) == (key, metrics.st_size) else None
    return None


# -- Tags and notes ----------------------------------------------------------------------------------------------------
# A run writes its first labels to run.json. Later changes go to labels.json, so that a live run can be labelled and
# no process overwrites another's file.


def read_labels(folder: Path, run: Mapping[str, Any]) -> dict[str, Any]:
    """`tags` and `notes` of the run with this run.json. Values of the wrong type are ignored."""
    return _labels({name: run.get(name) for name in ("tags", "notes")} | _read_json(folder / LABELS_FILE))


def write_labels(folder: Path, tags: Sequence[str], notes: str) -> None:
    check_tags(tags, "tags")
    labels = {"tags": list(dict.fromkeys(tags)), "notes": notes}
    write_atomically(folder / LABELS_FILE, hide_known(json.dumps(labels, indent=1)))


def relabel(folder: Path, logging: LoggingConfig) -> None:
    """On resume: labels that the new command changes replace the current ones; otherwise later edits are kept."""
    from covey.config.read import load_yaml  # slow to import

    path = folder / "config.yaml"
    config = load_yaml(path) if path.exists() else None
    original = config.get("logging") if isinstance(config, dict) else None
    if _labels(vars(logging)) != _labels(original if isinstance(original, dict) else {}):
        write_labels(folder, logging.tags, logging.notes)


def _labels(values: Mapping[str, Any]) -> dict[str, Any]:
    tags, notes = values.get("tags"), values.get("notes")
    return {
        "tags": [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else [],
        "notes": notes if isinstance(notes, str) else "",
    }


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty if the file is missing or was not written by us."""
    try:
        # A symlink could make a run folder from elsewhere display a file of this machine.
        if path.is_symlink() or path.stat().st_size > MAX_LABELS_BYTES:
            return {}
        data = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(data, ensure_ascii=False).encode()  # lone surrogates cannot be displayed
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
