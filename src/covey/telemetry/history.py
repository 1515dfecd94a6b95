"""metrics.jsonl read back: what reports, curves and a resumed console are drawn from."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import InputError
from covey.storage import is_locked
from covey.telemetry.jsonl import METRICS_FILE, read_record
from covey.telemetry.labels import read_labels

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
