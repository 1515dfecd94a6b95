"""Following a file of JSON lines that another process writes: only what is new is read, and a cut is noticed."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.telemetry.jsonl import METRICS_FILE, read_record

KEPT = 64  # bytes before the place we stand at, to recognise the file by


def at_home(path: Path) -> bool:
    """Whether a file is there, and in its folder. A link that leads elsewhere is not followed: a run that somebody sent
    must not show our other files, and a report must not take them along."""
    return path.is_file() and path.resolve().parent == path.parent.resolve()


class Tail:
    """The whole lines of a file, each once. A last line without its line break waits until it is finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.cuts = 0
        self._before = b""

    @property
    def size(self) -> int:
        return self.path.stat().st_size if at_home(self.path) else 0

    def skip_to(self, offset: int) -> None:
        """Lines before are known already."""
        self.offset, self._before = offset, b"\n" * min(offset, KEPT)
        self._before = self._bytes_before()

    def was_cut(self) -> bool:
        """A resumed run cuts its files back to a checkpoint and writes on: the bytes before our place are then gone or
        others. If so, begin again."""
        if not self._before or (self.size >= self.offset and self._bytes_before() == self._before):
            return False
        self.offset, self._before = 0, b""
        self.cuts += 1
        return True

    def lines(self, limit: int | None = None) -> Iterator[tuple[int, bytes]]:
        """(offset, line) of what is new; `limit`: stop after about so many bytes."""
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
                self._before = line[-KEPT:]
                yield start, line

    def _bytes_before(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset - len(self._before))
            return file.read(len(self._before))


# -- Numbers in columns: metrics.jsonl as one column per metric, thinned out to what a chart can show ------------------

Floats = NDArray[np.float64]
ROUND_OFF = 1e-6  # of a value: a few times the resolution of 32-bit floats
ZERO = 1e-7
POINTS = 1000  # buckets that a longer series is thinned out to: more than a chart has pixels, mostly


class Table:
    """Rows of named numbers; what a row lacks is NaN. Rows are only ever added."""

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
        """Steps and values, where there are any."""
        values = self.column(name)
        there = np.isfinite(values)
        return np.array(self.steps, dtype=np.int64)[there], values[there]


class Metrics:
    """metrics.jsonl, followed. An evaluation at s was made after s updates, the answers of step i after i."""

    def __init__(self, folder: Path) -> None:
        self._tail = Tail(folder / METRICS_FILE)
        self.tables = {"step": Table(), "eval": Table()}
        self.broken = 0  # lines that are no records: left out

    @property
    def version(self) -> tuple[int, int]:
        return self._tail.cuts, self._tail.offset

    def poll(self) -> bool:
        """Read what is new; whether there was anything."""
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
        """Where the rows lie on each axis: updates, measured seconds, generated tokens."""
        steps, evals = self.tables["step"], self.tables["eval"]
        at = np.array(steps.steps, dtype=np.float64)
        seconds = np.nan_to_num(steps.column("timing/step"))
        tokens = np.nan_to_num(steps.column("perf/generated_tokens")) + np.nan_to_num(steps.column("perf/read_tokens"))
        there = np.array(evals.steps, dtype=np.float64)
        took = np.nan_to_num(evals.column("timing/evaluate"))
        own = at if kind == "step" else there
        # Work of earlier steps and evaluations lies before: an evaluation at s is made before step s.
        past = np.searchsorted(at, own, side="left")
        measured = np.searchsorted(there, own, side="right")
        return {
            "step": own,
            "time": _sum_until(seconds, past) + _sum_until(took, measured),
            "tokens": _sum_until(tokens, past),
        }


def thin(columns: Mapping[str, Floats], axes: Mapping[str, Floats], points: int = POINTS) -> dict[str, Any]:
    """Series for a chart: as they are, or where they are long, mean and extremes of buckets of rows, so that no spike
    is lost."""
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


def level(name: str, values: Floats) -> float | None:
    """The value of a metric that is constant but for round-off, which a chart must not magnify into a curve. None: it
    varies, or is exactly constant. A learning rate may be tiny and real; of other metrics, what is below the resolution
    of the 32-bit sums they come from is zero."""
    there = values[np.isfinite(values)]
    if not len(there) or (spread := float(there.max() - there.min())) == 0:
        return None
    size = float(np.abs(there).max())
    if size < ZERO and name.rsplit("/", 1)[-1] != "lr":
        return 0.0
    return float(f"{np.median(there):.6g}") if spread <= ROUND_OFF * size else None


def listed(values: Floats | Sequence[float]) -> list[float | None]:
    """For JSON: seven digits are more than a chart can tell apart; what is not finite is null."""
    values = np.asarray(values, dtype=np.float64)
    there = np.isfinite(values) & (values != 0)
    size = np.floor(
        np.log10(np.abs(values, where=there, out=np.ones_like(values)), where=there, out=np.zeros_like(values))
    )
    scale = 10.0 ** np.clip(6 - size, -300, 300)
    rounded = np.where(there, np.round(values * scale) / scale, values)
    return [value if value - value == 0 else None for value in rounded.tolist()]


def _bucketed(values: Floats, starts: NDArray[np.int64]) -> dict[str, Any]:
    there = np.isfinite(values)
    values = np.where(there, values, np.nan)
    counts = np.add.reduceat(there.astype(np.float64), starts)
    sums = np.add.reduceat(np.where(there, values, 0.0), starts)
    with np.errstate(invalid="ignore"):
        means = sums / counts  # 0/0 where a bucket has none: NaN
    low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    return {"y": listed(means), "lo": listed(low), "hi": listed(high)}


def _sum_until(values: Floats, ends: NDArray[np.int64]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])[ends]


def _pad(column: array[float], rows: int) -> None:
    missing = rows - len(column)
    if missing > 0:
        column.extend([float("nan")] * missing)
