"""metrics.jsonl read back: what reports, curves and a resumed console are drawn from."""

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
from covey.telemetry.base import EpisodeView, RunInfo
from covey.telemetry.figures import curve_of, is_stage, key_figures
from covey.telemetry.jsonl import METRICS_FILE, read_record

KILLED = "killed"  # the status of a run whose process ended before it could write another one

Points = list[tuple[int, float]]

# What every run.json has, and what is read of it.
WRITTEN: dict[str, type] = {
    **dict.fromkeys(("status", "title", "algorithm", "model", "task", "trained_reward"), str),
    **{"reward_names": list, "total_steps": int},
}


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the file. Values that were not finite are left out."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class History:
    steps: tuple[Record, ...] = ()  # step: index of the training step, from 0
    evaluations: tuple[Record, ...] = ()  # step: number of updates done

    def training(self, key: str) -> Points:
        return _points(self.steps, key)

    def evaluated(self, key: str) -> Points:
        return _points(self.evaluations, key)

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
    found: dict[str, list[Record]] = {"step": [], "eval": []}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):  # still being written, or never will be
                break
            try:
                kind, step, metrics = read_record(line)
            except ValueError as error:  # it must not hide the others, nor keep a run from going on
                warnings.warn(f"{path}, line {number} is damaged and left out: {error}", stacklevel=2)
                continue
            found[kind].append(Record(step, {key: value for key, value in metrics.items() if value is not None}))
    return History(tuple(found["step"]), tuple(found["eval"]))


def read_run(folder: Path) -> dict[str, Any]:
    """run.json: what the loop wrote about the run, with its tags and notes as they are now. One that says `running`,
    and whose process is gone, was killed."""
    path = folder / "run.json"
    try:
        if not path.exists():
            raise InputError(f"{path}: no such file; is {folder} the folder of a run?")
        run = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(run, ensure_ascii=False).encode()  # half characters cannot be shown
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not what a run writes ({error})") from None
    except OSError as error:
        raise InputError(f"{str(path)[:200]}: cannot be read ({error.strerror})") from None
    for name, kind in WRITTEN.items():
        if not isinstance(run, dict) or not isinstance(run.get(name), kind):
            what = run.get(name) if isinstance(run, dict) else run
            raise InputError(f"{path}: not what a run writes: {name} must be {kind.__name__}, not {what!r:.40}")
    if run["status"] == "running" and is_locked(folder) is False:
        run["status"] = KILLED
    found: dict[str, Any] = run | read_labels(folder, run)
    return found


def _points(records: tuple[Record, ...], key: str) -> Points:
    return [(record.step, record.metrics[key]) for record in records if key in record.metrics]


# -- What both consoles know of a run: where it stands, what it measured, and how long it will take --------------------

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


# -- A run in a few numbers, for tables of many runs: its steps, its seconds and its evaluations -----------------------
# A run that ends keeps its totals in summary.json, together with the size
# of metrics.jsonl that they were counted from: while the size is the same, metrics.jsonl need not be read.

SUMMARY_FILE = "summary.json"
# The record of a step, as runs write it, is recognised by its two ends: that takes a tenth of the time of parsing it.
_STEP = re.compile(rb'\{"kind": "step", "step": \d{1,15}, "metrics": \{"')
_SECONDS = re.compile(rb'"timing/step": (-?\d+\.?\d*(?:[eE][-+]?\d+)?)')


@dataclass
class Totals:
    key: str  # the metric of an evaluation that the best one is chosen by
    size: int = 0  # bytes of metrics.jsonl that are counted
    steps: int = 0
    seconds: float = 0.0
    recent: list[float] = field(default_factory=list)  # seconds of the last steps
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # updates done, value of `key`
    broken: int = 0  # lines that are not records

    def add(self, line: bytes) -> None:
        """A whole line of metrics.jsonl."""
        self.size += len(line)
        if _STEP.match(line) and line.endswith(b"}}\n"):
            found = _SECONDS.search(line)
            self._add_step(float(found[1]) if found else None)
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
            self.recent = [*self.recent[1 - RECENT :], seconds]


def best_key(run: Mapping[str, Any]) -> str:
    """For the totals of a run whose run.json says `run`."""
    return curve_of(run.get("kind", "rl"), run["trained_reward"]).best


def write_totals(folder: Path, run: Mapping[str, Any]) -> None:
    totals = Totals(best_key(run))
    with (folder / METRICS_FILE).open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                totals.add(line)
    write_atomically(folder / SUMMARY_FILE, json.dumps(asdict(totals), indent=1))


def read_totals(folder: Path, key: str) -> Totals | None:
    """What summary.json says of the metrics.jsonl beside it; None where it says nothing, or speaks of another one."""
    path = folder / SUMMARY_FILE
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        metrics = (folder / METRICS_FILE).stat()
        if metrics.st_mtime_ns > path.stat().st_mtime_ns:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        points = [(int(step), float(value)) for step, value in found["evaluations"]]
        recent = [float(seconds) for seconds in found["recent"][-RECENT:]]
        counted = {name: int(found[name]) for name in ("size", "steps", "broken")}
        kept = Totals(key, **counted, seconds=float(found["seconds"]), recent=recent, evaluations=points)
        return kept if (found["key"], kept.size) == (key, metrics.st_size) else None
    return None


# -- Tags and notes of a run: given when it starts (`logging.tags`, `logging.notes`), or changed later -----------------
# What a run starts with is in run.json, which its own process rewrites. Changes go to labels.json beside it, so that a
# live run can be labelled too and no writer overwrites the other's file.

LABELS_FILE = "labels.json"
LONGEST_FILE = 1 << 20  # bytes; a larger one is not ours


def read_labels(folder: Path, run: Mapping[str, Any]) -> dict[str, Any]:
    """`tags` and `notes` of a run whose run.json says `run`. Values of another type count as none."""
    return _labels({name: run.get(name) for name in ("tags", "notes")} | _read(folder / LABELS_FILE))


def write_labels(folder: Path, tags: Sequence[str], notes: str) -> None:
    check_tags(tags, "tags")
    labels = {"tags": list(dict.fromkeys(tags)), "notes": notes}
    write_atomically(folder / LABELS_FILE, hide_known(json.dumps(labels, indent=1)))


def relabel(folder: Path, logging: LoggingConfig) -> None:
    """For a resumed run: labels that its command gives anew are taken over; otherwise later changes stay."""
    from covey.config.read import load_yaml  # slow to import, and of no use to whoever only reads labels

    path = folder / "config.yaml"
    began = load_yaml(path) if path.exists() else None
    given = began.get("logging") if isinstance(began, dict) else None
    if _labels(vars(logging)) != _labels(given if isinstance(given, dict) else {}):
        write_labels(folder, logging.tags, logging.notes)


def _labels(found: Mapping[str, Any]) -> dict[str, Any]:
    tags, notes = found.get("tags"), found.get("notes")
    return {
        "tags": [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else [],
        "notes": notes if isinstance(notes, str) else "",
    }


def _read(path: Path) -> dict[str, Any]:
    """What was written last; nothing where there is no such file, or another's."""
    try:
        if path.is_symlink() or path.stat().st_size > LONGEST_FILE:  # a folder of somebody else must not show our files
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(found, ensure_ascii=False).encode()  # half characters cannot be shown
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
