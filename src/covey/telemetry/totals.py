"""A run in a few numbers, for tables of many runs: its steps, its seconds and its evaluations.

A run that ends keeps its totals in summary.json, together with the size
of metrics.jsonl that they were counted from: while the size is the same, metrics.jsonl need not be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from covey.storage import write_whole
from covey.telemetry.figures import curve_of
from covey.telemetry.jsonl import METRICS_FILE, read_record
from covey.telemetry.state import RECENT

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
    write_whole(folder / SUMMARY_FILE, json.dumps(asdict(totals), indent=1))


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
