"""Run folders as the page sees them: one run, followed; and the library of all that were named."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from covey.config.read import load_yaml
from covey.dash.columns import Metrics
from covey.dash.episodes import Episodes
from covey.dash.signs import Evidence, Sign, find_signs
from covey.dash.tail import at_home
from covey.errors import InputError
from covey.redact import hide_settings
from covey.telemetry.base import flat
from covey.telemetry.figures import Curve, curve_of, is_stage
from covey.telemetry.history import read_run
from covey.telemetry.state import RECENT

SILENT = 10.0  # median steps without a word after which a running run is called silent
LOOK = 5.0  # seconds between two searches for new runs
PATIENCE = 120.0  # seconds, at least
MOST_TASKS = 1 << 40
Z = 1.959963984540054  # 95 % of the normal distribution lie within ± Z


class Run:
    """One folder. Whoever asks it something holds its lock, so that the follower does not add meanwhile."""

    def __init__(self, number: int, folder: Path, name: str) -> None:
        self.number, self.folder, self.name = number, folder, name
        self.lock = RLock()
        self.metrics, self.episodes = Metrics(folder), Episodes(folder)
        self.info = read_run(folder)
        self.notes: list[str] = []  # what of its folder cannot be read
        self.config = self._read_config()
        self.gone = False  # its folder is not there any more
        self.opened = False  # somebody looked: its episodes are indexed from then on
        self._signs: tuple[Any, list[Sign]] | None = None

    @property
    def curve(self) -> Curve:
        return curve_of(self.info.get("kind", "rl"), self.info["trained_reward"])

    @property
    def version(self) -> str:
        """Another one: there are new numbers, or another status."""
        cuts, offset = self.metrics.version
        return f"{cuts}.{offset}.{self.info['status']}"

    @property
    def tasks(self) -> int | None:
        """How many tasks an evaluation asks, where the run says."""
        said = self.info.get("held_out") or self.config.get("data.val_size")
        return said if isinstance(said, int) and 0 < said < MOST_TASKS else None

    def broken(self) -> list[str]:
        """What of its files could not be read, in words."""
        lines = (("metrics.jsonl", self.metrics.broken), ("episodes.jsonl", self.episodes.broken))
        counted = [f"{name}: {count} lines cannot be read and are left out" for name, count in lines if count]
        return [*self.notes, *counted]

    def _read_config(self) -> dict[str, Any]:
        path = self.folder / "config.yaml"
        try:
            tree = load_yaml(path) if at_home(path) else {}
            return flat(hide_settings(tree)) if isinstance(tree, dict) else {}
        except InputError as error:
            self.notes.append(str(error).splitlines()[0])
            return {}

    def poll(self) -> bool:
        """Read what is new in the numbers, and where somebody looks, a chunk of the episodes."""
        with self.lock:
            before = self.version
            if not (self.folder / "run.json").exists():
                self.gone = True  # somebody deleted it: what was read of it stays
                return False
            self.metrics.poll()
            more = self.opened and self.episodes.poll()
            with suppress(InputError):  # what was read before stays
                self.info = read_run(self.folder)
            return more or self.version != before

    def signs(self) -> list[Sign]:
        with self.lock:
            now = (self.metrics.version, len(self.episodes) // 1000)
            if self._signs is None or self._signs[0] != now:
                self._signs = (now, find_signs(self.evidence()))
            return self._signs[1]

    def evidence(self) -> Evidence:
        steps, evals = self.metrics.tables["step"], self.metrics.tables["eval"]
        return Evidence(
            {name: steps.points(name) for name in steps.names()},
            {name: evals.points(name) for name in evals.names()},
            self.tasks,
            self.episodes.column("length") if len(self.episodes) else None,
            self.episodes.column("reward") if len(self.episodes) else None,
        )

    def pace(self) -> float | None:
        """Median seconds of the recent steps."""
        seconds = self.metrics.tables["step"].points("timing/step")[1]
        return float(np.median(seconds[-RECENT:])) if len(seconds) else None

    def state(self) -> dict[str, Any]:
        """What the list of runs tells of it."""
        with self.lock:
            info, curve = self.info, self.curve
            shown = ("title", "algorithm", "model", "task", "status", "started", "trained_reward", "reward_names")
            done, total, pace = len(self.metrics.tables["step"]), info["total_steps"], self.pace()
            running = info["status"] == "running"
            best, last = self._best()
            quiet = self._quiet()
            return {name: info.get(name) for name in shown} | {
                "id": self.number,
                "name": self.name,
                "kind": info.get("kind", "rl"),
                "curve": {"key": curve.key, "best": curve.best, "name": curve.name, "falls": curve.falls}
                | {"measure": self.measure()},
                "done": done,
                "total": total,
                "seconds": self.seconds(),
                "eta": pace * (total - done) if running and pace is not None else None,
                "silent": quiet if running and quiet > max(PATIENCE, SILENT * (pace or 0.0)) else None,
                "best": best,
                "last": last,
                "episodes": len(self.episodes),
                "indexed": self.episodes.indexed,
                "signs": len(self.signs()),
                "version": self.version,
                "broken": self.broken(),
            }

    def seconds(self) -> float:
        tables = self.metrics.tables
        took = tables["step"].points("timing/step")[1].sum() + tables["eval"].points("timing/evaluate")[1].sum()
        return float(took)

    def stages(self) -> dict[str, float]:
        """Seconds of each stage in the whole run, longest first."""
        found: dict[str, float] = {}
        for table in self.metrics.tables.values():
            for name in table.names():
                if is_stage(name):
                    stage = name.removeprefix("timing/")
                    found[stage] = found.get(stage, 0.0) + float(table.points(name)[1].sum())
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def failures(self) -> dict[str, float]:
        table, start = self.metrics.tables["step"], "episodes/failed/"
        causes = [name for name in table.names() if name.startswith(start)]
        return {name.removeprefix(start): float(table.points(name)[1].sum()) for name in causes}

    def measure(self) -> str:
        """What its evaluations' numbers are called."""
        return self.curve.measure(self.metrics.tables["eval"].points(self.curve.best)[1])

    def _best(self) -> tuple[dict[str, float] | None, dict[str, float] | None]:
        steps, values = self.metrics.tables["eval"].points(self.curve.best)
        if not len(values):
            return None, None
        best = int(values.argmin() if self.curve.falls else values.argmax())
        return self._point(steps[best], values[best]), self._point(steps[-1], values[-1])

    def _point(self, step: int, value: float) -> dict[str, float]:
        found = {"step": int(step), "value": float(value)}
        if self.tasks and self.measure() == "accuracy":
            found["low"], found["high"] = wilson(float(value), self.tasks)
        return found

    def _quiet(self) -> float:
        files = [self.folder / name for name in ("metrics.jsonl", "run.json")]
        return time.time() - max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


class Library:
    """The runs that were named, and those that appear in the folders that were named. A run keeps its number."""

    def __init__(self, places: Sequence[Path]) -> None:
        self.places = list(places)
        self.runs: list[Run] = []
        self.left_out: list[str] = []  # folders that look like runs and cannot be read, and why
        self._known: set[Path] = set()
        self._looked: float | None = None
        self.look()
        if not self.runs:
            told = "".join(f"\n  {why}" for why in self.left_out)
            raise InputError(
                f"no run found in {', '.join(map(str, self.places))}{told}\n"
                "  name run folders (outputs/DATE/TIME), or a folder that holds some"
            )

    def look(self) -> None:
        """Add what is new, the newest last. Not at every turn: a walk over many folders takes its time."""
        if self._looked is not None and time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        there = [place for place in self.places if self._known == set() or place.is_dir()]
        found = [folder for folder in run_folders(there) if folder not in self._known]
        for folder in found:
            self._known.add(folder)
            try:
                self.runs.append(Run(len(self.runs), folder, self._name(folder)))
            except InputError as error:  # one damaged folder does not hide the others
                self.left_out.append(str(error))

    def poll(self) -> bool:
        """One round over all runs; whether anything was new."""
        self.look()
        changed, errors = False, []
        for run in self.runs:
            try:
                changed |= not run.gone and run.poll()
            except (OSError, ValueError) as error:  # one run's trouble is not the others'
                errors.append(error)
        if errors:
            raise errors[0]
        return changed

    def comparisons(self) -> list[dict[str, Any]]:
        """What `covey eval` compared, in folders that were named or lie beside the runs."""
        around = {*self.places, *(place / "eval" for place in self.places)}
        around |= {run.folder.parent.parent / "eval" for run in self.runs}
        files = sorted({file.resolve() for place in around for file in _results(place)})
        found: list[dict[str, Any]] = []
        for file in files:
            with suppress(ValueError, LookupError, TypeError, OSError, RecursionError):  # half written, or another's
                found += json.loads(file.read_text())["comparisons"]
        return found

    def _name(self, folder: Path) -> str:
        """Short, and without the path to it."""
        for place in self.places:
            if place != folder and folder.is_relative_to(place):
                return str(folder.relative_to(place))
        return "/".join(folder.resolve().parts[-2:])


def run_folders(places: Iterable[Path]) -> list[Path]:
    """Runs by the time they started, each once. What begins with a dot is not looked into."""
    found: dict[Path, str] = {}
    for place in places:
        if not _is_folder(place):
            raise InputError(f"{str(place)[:200]!r}: no such folder")
        for folder, inside, names in os.walk(place):
            if "run.json" in names and at_home(Path(folder, "run.json")) and Path(folder) not in found:
                found[Path(folder)] = _started(Path(folder))
            # A run holds no runs, only many files.
            inside[:] = [] if "run.json" in names else [name for name in inside if not name.startswith(".")]
    return sorted(found, key=lambda folder: (found[folder], str(folder)))


def _is_folder(place: Path) -> bool:
    try:
        return place.is_dir()
    except OSError:  # too long a name
        return False


def _started(folder: Path) -> str:
    try:
        return str(read_run(folder).get("started", ""))
    except InputError:  # told when it is opened
        return ""


def wilson(p: float, n: int) -> tuple[float, float]:
    """95 % interval of a share p of n tasks."""
    centre = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))


def _results(place: Path) -> list[Path]:
    return [path for path in (*place.glob("results.json"), *place.glob("*/results.json")) if at_home(path)]
