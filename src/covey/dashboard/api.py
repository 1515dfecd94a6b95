"""The requests of the page: query parameters in, data for JSON out. Runs are named by number, never by path."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from covey.dashboard.diagnostics import as_data, too_early
from covey.dashboard.differences import MISSING, differing_settings
from covey.dashboard.episodes import NUMBERS, Query
from covey.dashboard.metrics import constant_level, is_own_file, thin
from covey.dashboard.runs import Library, Run
from covey.evaluation.report import short_names
from covey.evaluation.scores import Comparison, sentence
from covey.evaluation.statistics import Estimate, wilson
from covey.telemetry.jsonl import IMAGES, finite

MAX_ROWS = 500  # of the episode list, per request
MAX_DOTS = 3000  # of a scatter plot
MAX_RELATED = 64
IMAGE = re.compile(r"images/([0-9a-f]{64}\.(png|jpg|webp|gif|bmp))")  # as an episode names it

Params = Mapping[str, str]


class BadRequest(Exception):
    """A request with invalid parameters."""


class Api:
    def __init__(self, library: Library) -> None:
        self.library = library
        self.requests: dict[str, Callable[[Params], Any]] = {
            "runs": self.runs,
            "run": self.run,
            "series": self.series,
            "episodes": self.episodes,
            "episode": self.episode,
            "related": self.related,
            "scatter": self.scatter,
            "compare": self.compare,
        }

    def answer(self, name: str, params: Params) -> Any:
        if name not in self.requests:
            raise BadRequest(f"there is no {name}")
        data = self.requests[name](params)
        return data if name == "series" else finite(data)  # series are large and already finite

    def runs(self, params: Params) -> Any:
        return {"runs": [run.state() for run in self.library.runs]}

    def run(self, params: Params) -> Any:
        run = self._run(params)
        with run.lock:
            tables = run.metrics.tables
            return {
                "state": run.state(),
                "names": {kind: table.names() for kind, table in tables.items()},
                "early": too_early(run.totals.steps),
                "findings": as_data(run.findings()),
                "stages": run.stages(),
                "failures": run.failures(),
                "config": run.config,
                "tasks": run.tasks,
            }

    def series(self, params: Params) -> Any:
        """?run&kind=step|eval&names=a,b: thinned out, with all three axes."""
        run, kind = self._run(params), params.get("kind", "step")
        if kind not in ("step", "eval"):
            raise BadRequest("kind is step or eval")
        with run.lock:
            table = run.metrics.tables[kind]
            names = [name for name in params.get("names", "").split(",") if name in table.names()]
            columns = {name: table.column(name) for name in names}
            data = thin(columns, run.metrics.axes(kind))
            for name, series in data["series"].items():
                if (level := constant_level(name, columns[name])) is not None:
                    series["level"] = level
                if kind == "eval":
                    _add_interval(series, run, name)
            return data

    def episodes(self, params: Params) -> Any:
        """?run&offset&limit and the fields of Query."""
        run = self._run(params)
        offset, limit = _integer(params, "offset", 0), _integer(params, "limit", 100)
        query = _query(params)
        with run.lock:
            indices = run.episodes.find(query)
            rows = [run.episodes.row(int(index)) for index in indices[offset : offset + min(limit, MAX_ROWS)]]
            return {
                "total": len(indices),
                "recorded": len(run.episodes),
                "indexed": run.episodes.indexed,
                "stops": run.episodes.stops.all,
                "rows": rows,
            }

    def episode(self, params: Params) -> Any:
        run = self._run(params)
        with run.lock:
            return run.episodes.read(self._index(run, params))

    def image(self, params: Params) -> tuple[bytes, str]:
        """?run&name: an image of an episode, and its type. The name is a hash, so no other file can be read."""
        name = IMAGE.fullmatch(params.get("name", ""))
        path = self._run(params).folder / IMAGES / name[1] if name else None
        if name is None or path is None or not is_own_file(path):
            raise BadRequest("there is no such image")
        return path.read_bytes(), f"image/{name[2].replace('jpg', 'jpeg')}"

    def related(self, params: Params) -> Any:
        """?run&id&kind=group|task: the attempts of its group, or the same task across steps."""
        run = self._run(params)
        with run.lock:
            indices = run.episodes.related(self._index(run, params), group=params.get("kind", "group") == "group")
            return {"total": len(indices), "rows": [run.episodes.row(index) for index in indices[:MAX_RELATED]]}

    def scatter(self, params: Params) -> Any:
        """?run&x&y: two columns of the recorded episodes, evenly subsampled if there are many."""
        run = self._run(params)
        with run.lock:
            names = run.episodes.names()
            x, y = params.get("x", "length"), params.get("y", "reward")
            if x not in names or y not in names:
                raise BadRequest(f"one of {names}")
            xs, ys, steps = (run.episodes.column(name) for name in (x, y, "step"))
            known = np.flatnonzero(np.isfinite(xs) & np.isfinite(ys))
            vary = len(known) > 1 and xs[known].std() > 0 and ys[known].std() > 0
            picked = known[np.linspace(0, len(known) - 1, min(len(known), MAX_DOTS)).astype(np.int64)]
            return {
                "names": names,
                "total": len(known),
                "correlation": float(np.corrcoef(xs[known], ys[known])[0, 1]) if vary else None,
                "x": xs[picked].tolist(),
                "y": ys[picked].tolist(),
                "step": steps[picked].tolist(),
                "id": picked.tolist(),
            }

    def compare(self, params: Params) -> Any:
        """?runs=0,1: differing settings, evaluations side by side, and the comparisons of covey eval."""
        runs = [self._run({"run": number}) for number in params.get("runs", "0").split(",")]
        with ExitStack() as locks:
            for run in sorted(set(runs), key=lambda run: run.number):  # in one order, to avoid a deadlock
                locks.enter_context(run.lock)
            settings = differing_settings([run.config for run in runs])
            return {
                "settings": [
                    [key, *("–" if value is MISSING else value for value in values)] for key, values in settings.items()
                ],
                "unpaired": [data for run in runs[1:] if (data := unpaired(runs[0], run)) is not None],
                "paired": [data for c in self.library.comparisons() if (data := _paired(c)) is not None],
            }

    def csv(self, params: Params) -> str:
        """Every metric of every step and evaluation."""
        run = self._run(params)
        with run.lock:
            tables = run.metrics.tables
            names = sorted({name for table in tables.values() for name in table.names()})
            out = io.StringIO()
            writer = csv.writer(out)
            writer.writerow(["kind", "step", *names])
            for kind, table in tables.items():
                columns = [table.column(name) for name in names]
                for row, step in enumerate(table.steps):
                    values = (column[row] for column in columns)
                    writer.writerow(
                        [kind, step, *("" if math.isnan(value) else repr(float(value)) for value in values)]
                    )
            return out.getvalue()

    def _run(self, params: Params) -> Run:
        number = _integer(params, "run", 0)
        if number >= len(self.library.runs):
            raise BadRequest(f"there is no run {number}")
        run = self.library.runs[number]
        run.open()
        return run

    def _index(self, run: Run, params: Params) -> int:
        index = _integer(params, "id", 0)
        if index >= len(run.episodes):
            raise BadRequest(f"there is no episode {index}")
        return index


def unpaired(first: Run, second: Run) -> dict[str, Any] | None:
    """Compare the last evaluations after the same number of updates; if there are none, the last of each.

    A run does not keep the single answers of its evaluations, so they are treated as independent shares: Newcombe's
    interval, from the two Wilson intervals.
    """
    ours, theirs = dict(first.totals.evaluations), dict(second.totals.evaluations)
    if not ours or not theirs or not first.tasks or not second.tasks:
        return None
    if {first.measure(), second.measure()} != {"accuracy"}:  # the interval is for shares
        return None
    shared = [step for step in sorted(ours) if step in theirs and step > 0]
    at, other = (
        (shared[-1], shared[-1]) if shared else (first.totals.evaluations[-1][0], second.totals.evaluations[-1][0])
    )
    a, b = ours[at], theirs[other]
    (a_low, a_high), (b_low, b_high) = wilson(a, first.tasks), wilson(b, second.tasks)
    return {
        "first": first.number,
        "second": second.number,
        "steps": [at, other],
        "a": a,
        "b": b,
        "low": b - a - math.hypot(b - b_low, a_high - a),
        "high": b - a + math.hypot(b_high - b, a - a_low),
    }


def _paired(data: dict[str, Any]) -> dict[str, Any] | None:
    """A comparison of covey eval with its sentence; None if it has another format."""
    try:
        estimate = {name: math.nan if value is None else value for name, value in data["difference"].items()}
        comparison = Comparison(**(data | {"difference": Estimate(**estimate)}))
        names = short_names([comparison.first, comparison.second])
        named = data | {"first": names[comparison.first], "second": names[comparison.second]}
        return named | {"sentence": sentence(comparison, names)}
    except (TypeError, ValueError, LookupError, AttributeError):
        return None


def _add_interval(series: dict[str, Any], run: Run, name: str) -> None:
    """Add the confidence interval of a share."""
    values = [value for value in series["y"] if value is not None]
    share = all(0 <= value <= 1 for value in values) and not name.endswith(("/length_mean", "/failed", "eval/loss"))
    if run.tasks and share and "lo" not in series:
        bounds = [(None, None) if value is None else wilson(value, run.tasks) for value in series["y"]]
        series["lo"], series["hi"] = [low for low, _ in bounds], [high for _, high in bounds]
        series["band"] = f"95 % interval of {run.tasks} tasks"


def _query(params: Params) -> Query:
    sort = params.get("sort", "step")
    if sort not in NUMBERS:
        raise BadRequest(f"sort by one of {NUMBERS}")
    bounds = ("min_reward", "max_reward", "min_length", "max_length", "first_step", "last_step")
    return Query(
        task=params.get("task", ""),
        text=params.get("text", ""),
        stop=params.get("stop", ""),
        tool_errors=params.get("tool_errors") == "1",
        failed=params.get("failed") == "1",
        sort=sort,
        descending=params.get("order", "down") == "down",
        **{name: _number(params, name) for name in bounds},
    )


def _number(params: Params, name: str) -> float | None:
    text = params.get(name, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise BadRequest(f"{name} is a number") from None


def _integer(params: Params, name: str, default: int) -> int:
    text = params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise BadRequest(f"{name} is a whole number")
    return int(text)
