"""What the page can ask: names and numbers in, data for JSON out. Runs are named by number, never by path."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from covey.dashboard.diagnostics import as_data, too_early
from covey.dashboard.differences import MISSING, differing_settings
from covey.dashboard.episodes import NUMBERS, Query
from covey.dashboard.metrics import level, thin
from covey.dashboard.runs import Library, Run, wilson
from covey.evaluation.report import short_names
from covey.evaluation.scores import Comparison, sentence
from covey.evaluation.statistics import Estimate
from covey.telemetry.jsonl import finite

MOST_ROWS = 500  # of the list, at a time
MOST_DOTS = 3000  # of a scatter
MOST_RELATED = 64

Asked = Mapping[str, str]


class BadRequest(Exception):
    """The page asked for something that is not there."""


class Api:
    def __init__(self, library: Library) -> None:
        self.library = library
        self.answers: dict[str, Callable[[Asked], Any]] = {
            "runs": self.runs,
            "run": self.run,
            "series": self.series,
            "episodes": self.episodes,
            "episode": self.episode,
            "related": self.related,
            "scatter": self.scatter,
            "compare": self.compare,
        }

    def answer(self, name: str, asked: Asked) -> Any:
        if name not in self.answers:
            raise BadRequest(f"there is no {name}")
        found = self.answers[name](asked)
        return found if name == "series" else finite(found)  # series have no NaN left, and many numbers

    def runs(self, asked: Asked) -> Any:
        return {"runs": [run.state() for run in self.library.runs]}

    def run(self, asked: Asked) -> Any:
        run = self._run(asked)
        with run.lock:
            tables = run.metrics.tables
            return {
                "state": run.state(),
                "names": {kind: table.names() for kind, table in tables.items()},
                "early": too_early(run.totals.steps),
                "signs": as_data(run.signs()),
                "stages": run.stages(),
                "failures": run.failures(),
                "config": run.config,
                "tasks": run.tasks,
            }

    def series(self, asked: Asked) -> Any:
        """?run&kind=step|eval&names=a,b: thinned out, with all three axes."""
        run, kind = self._run(asked), asked.get("kind", "step")
        if kind not in ("step", "eval"):
            raise BadRequest("kind is step or eval")
        with run.lock:
            table = run.metrics.tables[kind]
            wanted = [name for name in asked.get("names", "").split(",") if name in table.names()]
            columns = {name: table.column(name) for name in wanted}
            found = thin(columns, run.metrics.axes(kind))
            for name, series in found["series"].items():
                if (value := level(name, columns[name])) is not None:
                    series["level"] = value
            if kind == "eval":
                for name, series in found["series"].items():
                    _add_interval(series, run, name)
            return found

    def episodes(self, asked: Asked) -> Any:
        """?run&offset&limit and the fields of Query."""
        run = self._run(asked)
        offset, limit = _whole(asked, "offset", 0), _whole(asked, "limit", 100)
        query = _query(asked)
        with run.lock:
            places = run.episodes.find(query)
            rows = [run.episodes.row(int(place)) for place in places[offset : offset + min(limit, MOST_ROWS)]]
            return {
                "total": len(places),
                "recorded": len(run.episodes),
                "indexed": run.episodes.indexed,
                "stops": run.episodes.stops.all,
                "rows": rows,
            }

    def episode(self, asked: Asked) -> Any:
        run = self._run(asked)
        with run.lock:
            return run.episodes.read(self._place(run, asked))

    def related(self, asked: Asked) -> Any:
        """?run&id&kind=group|task: the attempts of its group, or the same task across steps."""
        run = self._run(asked)
        with run.lock:
            found = run.episodes.like(self._place(run, asked), group=asked.get("kind", "group") == "group")
            return {"total": len(found), "rows": [run.episodes.row(place) for place in found[:MOST_RELATED]]}

    def scatter(self, asked: Asked) -> Any:
        """?run&x&y: two numbers of the recorded episodes against each other; evenly picked where they are many."""
        run = self._run(asked)
        with run.lock:
            names = run.episodes.names()
            x, y = asked.get("x", "length"), asked.get("y", "reward")
            if x not in names or y not in names:
                raise BadRequest(f"one of {names}")
            xs, ys, steps = (run.episodes.column(name) for name in (x, y, "step"))
            known = np.flatnonzero(np.isfinite(xs) & np.isfinite(ys))
            differ = len(known) > 1 and xs[known].std() > 0 and ys[known].std() > 0
            picked = known[np.linspace(0, len(known) - 1, min(len(known), MOST_DOTS)).astype(np.int64)]
            return {
                "names": names,
                "total": len(known),
                "correlation": float(np.corrcoef(xs[known], ys[known])[0, 1]) if differ else None,
                "x": xs[picked].tolist(),
                "y": ys[picked].tolist(),
                "step": steps[picked].tolist(),
                "id": picked.tolist(),
            }

    def compare(self, asked: Asked) -> Any:
        """?runs=0,1: settings that differ, evaluations beside each other, and what covey eval has compared."""
        runs = [self._run({"run": number}) for number in asked.get("runs", "0").split(",")]
        with ExitStack() as held:
            for run in sorted(set(runs), key=lambda run: run.number):  # one order, so that nobody waits in a circle
                held.enter_context(run.lock)
            return self._compared(runs)

    def _compared(self, runs: list[Run]) -> Any:
        settings = differing_settings([run.config for run in runs])
        return {
            "settings": [[key, *map(_shown, values)] for key, values in settings.items()],
            "unpaired": [found for run in runs[1:] if (found := unpaired(runs[0], run)) is not None],
            "paired": [shown for found in self.library.comparisons() if (shown := _paired(found)) is not None],
        }

    def csv(self, asked: Asked) -> str:
        """Every number of every step and evaluation."""
        run = self._run(asked)
        with run.lock:
            tables = run.metrics.tables
            names = sorted({name for table in tables.values() for name in table.names()})
            out = io.StringIO()
            writer = csv.writer(out)
            writer.writerow(["kind", "step", *names])
            for kind, table in tables.items():
                columns = [table.column(name) for name in names]
                for place, step in enumerate(table.steps):
                    values = [column[place] for column in columns]
                    writer.writerow(
                        [kind, step, *("" if math.isnan(value) else repr(float(value)) for value in values)]
                    )
            return out.getvalue()

    def _run(self, asked: Asked) -> Run:
        number = _whole(asked, "run", 0)
        if number >= len(self.library.runs):
            raise BadRequest(f"there is no run {number}")
        run = self.library.runs[number]
        run.open()
        return run

    def _place(self, run: Run, asked: Asked) -> int:
        place = _whole(asked, "id", 0)
        if place >= len(run.episodes):
            raise BadRequest(f"there is no episode {place}")
        return place


def _shown(value: Any) -> Any:
    return "–" if value is MISSING else value


def unpaired(first: Run, second: Run) -> dict[str, Any] | None:
    """The last evaluation that both made after as many updates; where there is none, the last of each. A run keeps no
    single answers of its evaluations, so the interval is that of two independent shares (Newcombe's, from the two
    Wilson intervals)."""
    ours, theirs = dict(first.totals.evaluations), dict(second.totals.evaluations)
    if not ours or not theirs or not first.tasks or not second.tasks:
        return None
    if {first.measure(), second.measure()} != {"accuracy"}:  # the interval is that of shares
        return None
    shared = [step for step in sorted(ours) if step in theirs and step > 0]
    at, other = (
        (shared[-1], shared[-1]) if shared else (first.totals.evaluations[-1][0], second.totals.evaluations[-1][0])
    )
    a, b = ours[at], theirs[other]
    (al, ah), (bl, bh) = wilson(a, first.tasks), wilson(b, second.tasks)
    low, high = b - a - math.hypot(b - bl, ah - a), b - a + math.hypot(bh - b, a - al)
    return {
        "first": first.number,
        "second": second.number,
        "steps": [at, other],
        "a": a,
        "b": b,
        "low": low,
        "high": high,
    }


def _paired(found: dict[str, Any]) -> dict[str, Any] | None:
    """None: the file is not one of covey eval's, or of another version's."""
    try:
        estimate = {name: math.nan if value is None else value for name, value in found["difference"].items()}
        whole = Comparison(**(found | {"difference": Estimate(**estimate)}))
        names = short_names([whole.first, whole.second])
        shown = found | {"first": names[whole.first], "second": names[whole.second]}
        return shown | {"sentence": sentence(whole, names)}
    except (TypeError, ValueError, LookupError, AttributeError):
        return None


def _add_interval(series: dict[str, Any], run: Run, name: str) -> None:
    """A share of so many tasks is known only so well."""
    values = [value for value in series["y"] if value is not None]
    share = all(0 <= value <= 1 for value in values) and not name.endswith(("/length_mean", "/failed", "eval/loss"))
    if run.tasks and share and "lo" not in series:
        bounds = [(None, None) if value is None else wilson(value, run.tasks) for value in series["y"]]
        series["lo"], series["hi"] = [low for low, _ in bounds], [high for _, high in bounds]
        series["band"] = f"95 % interval of {run.tasks} tasks"


def _query(asked: Asked) -> Query:
    sort = asked.get("sort", "step")
    if sort not in NUMBERS:
        raise BadRequest(f"sort by one of {NUMBERS}")
    bounds = ("min_reward", "max_reward", "min_length", "max_length", "first_step", "last_step")
    return Query(
        task=asked.get("task", ""),
        text=asked.get("text", ""),
        stop=asked.get("stop", ""),
        tool_errors=asked.get("tool_errors") == "1",
        failed=asked.get("failed") == "1",
        sort=sort,
        descending=asked.get("order", "down") == "down",
        **{name: _bound(asked, name) for name in bounds},
    )


def _bound(asked: Asked, name: str) -> float | None:
    text = asked.get(name, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise BadRequest(f"{name} is a number") from None


def _whole(asked: Asked, name: str, default: int) -> int:
    text = asked.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise BadRequest(f"{name} is a whole number")
    return int(text)
