"""metrics.jsonl read back: what reports, curves and a resumed console are drawn from."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import InputError
from covey.telemetry.jsonl import METRICS_FILE

Points = list[tuple[int, float]]
KEYS = ("status", "title", "algorithm", "model", "task", "total_steps", "trained_reward")  # that every reader needs


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
            if line.endswith(b"\n") and (read := read_record(line, f"{path}, line {number}")) is not None:
                found[read[0]].append(read[1])
    return History(tuple(found["step"]), tuple(found["eval"]))


def read_run(folder: Path) -> dict[str, Any]:
    """run.json: what the loop wrote about the run."""
    path = folder / "run.json"
    if not path.exists():
        raise InputError(f"{path}: no such file; is {folder} the folder of a run?")
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error}") from error
    missing = [key for key in KEYS if key not in run] if isinstance(run, dict) else list(KEYS)
    if missing:
        raise InputError(f"{path} is damaged: it does not say {', '.join(missing)}")
    return dict(run)


def read_record(line: bytes, place: str) -> tuple[str, Record] | None:
    """One line of metrics.jsonl: its kind, `step` or `eval`, and the numbers that are finite. A damaged one is told of
    and left out: it must not hide the others, nor keep a run from going on."""
    try:
        found = json.loads(line)
        kind, step, metrics = found["kind"], found["step"], found["metrics"]
        record = Record(int(step), {str(key): float(value) for key, value in metrics.items() if value is not None})
        if kind not in ("step", "eval"):
            raise ValueError(f"kind is {kind!r}")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        warnings.warn(f"{place} is damaged and left out: {type(error).__name__}: {error}", stacklevel=2)
        return None
    return kind, record


def _points(records: tuple[Record, ...], key: str) -> Points:
    return [(record.step, record.metrics[key]) for record in records if key in record.metrics]
