"""Follows metrics.jsonl while a run writes it, and prepares its metrics for charts.

`Tail` reads the new lines of any JSONL file and notices when it was truncated. `Metrics` holds one column per metric;
`thin` reduces long series to what a chart can show.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.telemetry.jsonl import METRICS_FILE, read_record

FINGERPRINT_BYTES = 64  # before the current offset, to recognise the file by

Floats = NDArray[np.float64]
ROUND_OFF = 1e-6  # of a value: a few times the resolution of 32-bit floats
ZERO = 1e-7
POINTS = 1000  # buckets of a thinned series: about the pixels of a chart


def is_own_file(path: Path) -> bool:
    """Whether the file exists and lies in its folder.

    Links to other places are not followed: a run folder from elsewhere must not expose files of this machine.
    """
    return path.is_file() and path.resolve().parent == path.parent.resolve()


class Tail:
    """The complete lines of a file, each once. An incomplete last line waits until it is finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.cuts = 0
        self._before = b""

    @property
    def size(self) -> int:
        return self.path.stat().st_size if is_own_file(self.path) else 0

    def skip_to(self, offset: int) -> None:
        self.offset, self._before = offset, b"\n" * min(offset, FINGERPRINT_BYTES)
        self._before = self._bytes_before()

    def was_cut(self) -> bool:
        """Whether the file was truncated, as a resumed run does; then reading starts again.

        If so, the bytes before the offset are missing or different.
        """
        if not self._before or (self.size >= self.offset and self._bytes_before() == self._before):
            return False
        self.offset, self._before = 0, b""
        self.cuts += 1
        return True

    def lines(self, limit: int | None = None) -> Iterator[tuple[int, bytes]]:
        """(offset, line) of each new line; stops after about `limit` bytes."""
        if self.size <= self.offset:
            return
        stop = None if limit is None else self.offset + limit
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while stop is None or self.offset < stop:
                line = file.readline()
                if not line.endswith(b"\n"):
                    return
                start, self.offset = self.offset, self.offset + len(line)
                self._before = line[-FINGERPRINT_BYTES:]
                yield start, line

    def _bytes_before(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset - len(self._before))
            return file.read(len(self._before))


class Table:
    """Append-only rows of named numbers, stored as columns. Missing values are NaN."""

    def __init__(self) -> None:
        self.steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: int, values: Mapping[str, float | None]) -> None:
        before = len(self.steps)
        self.steps.append(step)
        for name, value in values.items():
            column = self._columns.setdefault(name, array("d"))
            _pad(column, before)
            column.append(float("nan") if value is None else value)

    def names(self) -> list[str]:
        return sorted(self._columns)

    def column(self, name: str) -> Floats:
        column = self._columns.get(name, array("d"))
        _pad(column, len(self.steps))
        return np.array(column, dtype=np.float64)

    def points(self, name: str) -> tuple[NDArray[np.int64], Floats]:
        """Steps and values, without missing values."""
        values = self.column(name)
        known = np.isfinite(values)
        return np.array(self.steps, dtype=np.int64)[known], values[known]


class Metrics:
    """metrics.jsonl as tables. An evaluation at s was made after s updates, the answers of step i after i."""

    def __init__(self, folder: Path) -> None:
        self._tail = Tail(folder / METRICS_FILE)
        self.tables = {"step": Table(), "eval": Table()}
        self.broken = 0  # skipped lines that are not records

    @property
    def version(self) -> tuple[int, int]:
        return self._tail.cuts, self._tail.offset

    def poll(self) -> bool:
        """Read new lines; returns whether there were any."""
        before = self.version
        if self._tail.was_cut():
            self.tables, self.broken = {"step": Table(), "eval": Table()}, 0
        for _, line in self._tail.lines():
            try:
                kind, step, values = read_record(line)
            except ValueError:
                self.broken += 1
            else:
                self.tables[kind].add(step, values)
        return self.version != before

    def axes(self, kind: str) -> dict[str, Floats]:
        """The position of the rows on each axis: updates, measured seconds, generated tokens."""
        steps, evals = self.tables["step"], self.tables["eval"]
        step_at = np.array(steps.steps, dtype=np.float64)
        seconds = np.nan_to_num(steps.column("timing/step"))
        tokens = np.nan_to_num(steps.column("perf/generated_tokens")) + np.nan_to_num(steps.column("perf/read_tokens"))
        eval_at = np.array(evals.steps, dtype=np.float64)
        eval_seconds = np.nan_to_num(evals.column("timing/evaluate"))
        at = step_at if kind == "step" else eval_at
        # An evaluation at s is made before step s.
        steps_before = np.searchsorted(step_at, at, side="left")
        evals_before = np.searchsorted(eval_at, at, side="right")
        return {
            "step": at,
            "time": _sum_until(seconds, steps_before) + _sum_until(eval_seconds, evals_before),
            "tokens": _sum_until(tokens, steps_before),
        }


def thin(columns: Mapping[str, Floats], axes: Mapping[str, Floats], points: int = POINTS) -> dict[str, Any]:
    """Series for a chart. Long ones become mean and extremes of buckets, so that no spike is lost."""
    rows = len(axes["step"])
    if rows <= 2 * points:
        series = {name: {"y": listed(values)} for name, values in columns.items()}
        return {"rows": rows, "axes": {name: listed(values) for name, values in axes.items()}, "series": series}
    starts = np.linspace(0, rows, points, endpoint=False).astype(np.int64)
    return {
        "rows": rows,
        "axes": {name: listed(values[starts]) for name, values in axes.items()},
        "series": {name: _bucketed(values, starts) for name, values in columns.items()},
    }


def constant_level(name: str, values: Floats) -> float | None:
    """The value of a metric that only varies by round-off, which a chart must not magnify into a curve.

    None if it varies, or is exactly constant. Values below the resolution of 32-bit sums are zero, except learning
    rates, which may be tiny.
    """
    known = values[np.isfinite(values)]
    if not len(known) or (spread := float(known.max() - known.min())) == 0:
        return None
    size = float(np.abs(known).max())
    if size < ZERO and name.rsplit("/", 1)[-1] != "lr":
        return 0.0
    return float(f"{np.median(known):.6g}") if spread <= ROUND_OFF * size else None


def listed(values: Floats | Sequence[float]) -> list[float | None]:
    """For JSON: rounded to seven digits; non-finite values are None."""
    values = np.asarray(values, dtype=np.float64)
    known = np.isfinite(values) & (values != 0)
    size = np.floor(
        np.log10(np.abs(values, where=known, out=np.ones_like(values)), where=known, out=np.zeros_like(values))
    )
    scale = 10.0 ** np.clip(6 - size, -300, 300)
    rounded = np.where(known, np.round(values * scale) / scale, values)
    return [value if value - value == 0 else None for value in rounded.tolist()]


def _bucketed(values: Floats, starts: NDArray[np.int64]) -> dict[str, Any]:
    known = np.isfinite(values)
    values = np.where(known, values, np.nan)
    counts = np.add.reduceat(known.astype(np.float64), starts)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    with np.errstate(invalid="ignore"):
        means = sums / counts  # NaN for an empty bucket
    low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    return {"y": listed(means), "lo": listed(low), "hi": listed(high)}


def _sum_until(values: Floats, ends: NDArray[np.int64]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])[ends]


def _pad(column: array[float], rows: int) -> None:
    missing = rows - len(column)
    if missing > 0:
        column.extend([float("nan")] * missing)
