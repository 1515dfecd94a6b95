"""Run folders as the page sees them: one run, followed; and the library of all that were named.

Of every run the totals are followed, which are cheap; the metrics and episodes of a run are read once somebody opens
it, and followed from then on.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import Any

from covey.config.read import load_yaml
from covey.dashboard.diagnostics import Evidence, Sign, find_signs
from covey.dashboard.differences import run_names
from covey.dashboard.episodes import Episodes
from covey.dashboard.metrics import Metrics, Tail, at_home
from covey.errors import InputError
from covey.redact import hide, hide_settings
from covey.telemetry.base import flatten
from covey.telemetry.history import LABELS_FILE, SUMMARY_FILE, Totals, best_metric, read_run, read_totals
from covey.telemetry.jsonl import METRICS_FILE
from covey.telemetry.key_metrics import Curve, curve_of, is_stage

INFO_FILE, CONFIG_FILE = "run.json", "config.yaml"
SHOWN = (  # of run.json, in the table of runs
    *("title", "algorithm", "model", "task", "status", "started", "trained_reward", "reward_names", "tags", "notes"),
)

SILENT = 10.0  # median steps without a word after which a running run is called silent
LOOK = 5.0  # seconds between two searches for new runs
PATIENCE = 120.0  # seconds, at least
MOST_TASKS = 1 << 40
Z = 1.959963984540054  # 95 % of the normal distribution lie within ± Z

# Settings of many runs are mostly the same words. What is sent is looked through for known secrets once more.
_hide = lru_cache(maxsize=4096)(hide)


class Run:
    """One folder. Whoever asks it something holds its lock, so that the follower does not add meanwhile."""

    def __init__(self, number: int, folder: Path, name: str) -> None:
        self.number, self.folder, self.name = number, folder, name
        self.lock = RLock()
        self.label = name  # what sets it apart from the others: the library knows those
        self.metrics, self.episodes = Metrics(folder), Episodes(folder)
        self.info = read_run(folder)
        self.config, self.unread = self._read_config()
        self.gone = False  # its folder is not there any more
        self.opened = False
        self._signs: tuple[Any, list[Sign]] | None = None
        self._tail = Tail(folder / METRICS_FILE)
        self._stamps = self._stamp()
        kept = read_totals(folder, best_metric(self.info)) if self._has_summary() else None
        self.totals = kept or Totals(best_metric(self.info))
        if kept is not None:
            self._tail.skip_to(kept.size)

    @property
    def curve(self) -> Curve:
        return curve_of(self.info.get("kind", "rl"), self.info["trained_reward"])

    @property
    def version(self) -> str:
        """Another one: there are new numbers, another status or other labels."""
        return f"{self._tail.cuts}.{self._tail.offset}.{self.info['status']}.{self._stamps.get(LABELS_FILE, (0,))[0]}"

    @property
    def tasks(self) -> int | None:
        """How many tasks an evaluation asks, where the run says."""
        said = self.info.get("held_out") or self.config.get("data.val_size")
        return said if isinstance(said, int) and 0 < said < MOST_TASKS else None

    def broken(self) -> list[str]:
        """What of its files could not be read, in words."""
        broken = max(self.totals.broken, self.metrics.broken)
        lines = ((METRICS_FILE, broken), ("episodes.jsonl", self.episodes.broken))
        counted = [f"{name}: {count} lines cannot be read and are left out" for name, count in lines if count]
        return [*self.unread, *counted]

    def _read_config(self) -> tuple[dict[str, Any], list[str]]:
        """Its settings by their dotted names, and why they cannot be read."""
        path = self.folder / CONFIG_FILE
        try:
            tree = load_yaml(path) if at_home(path) else {}
            return (flatten(hide_settings(tree, text=_hide)) if isinstance(tree, dict) else {}), []
        except InputError as error:
            return {}, [str(error).splitlines()[0]]

    def _has_summary(self) -> bool:
        return at_home(self.folder / SUMMARY_FILE) and at_home(self.folder / METRICS_FILE)

    def _stamp(self) -> dict[str, tuple[int, int]]:
        """Time and size of each file that is followed: one that has the same as before need not be read."""
        found = {}
        for name in (INFO_FILE, METRICS_FILE, CONFIG_FILE, LABELS_FILE):
            with suppress(OSError):
                stat = (self.folder / name).stat()
                found[name] = (stat.st_mtime_ns, stat.st_size)
        return found

    def open(self) -> None:
        """Read its numbers, if that was not done yet; they and its episodes are followed from now on."""
        with self.lock:
            if not self.opened:
                self.opened = True
                self.metrics.poll()

    def poll(self) -> bool:
        """Read what is new: the totals, and where somebody has opened the run, numbers and a chunk of the episodes."""
        with self.lock:
            before, stamps = self.version, self._stamp()
            if INFO_FILE not in stamps:
                self.gone = True  # somebody deleted it: what was read of it stays
                return False
            # A run that was killed leaves its files as they are: its lock tells.
            if stamps != self._stamps or self.info["status"] == "running" or not self._tail.offset:
                self._read_changes(stamps)
            more = False
            if self.opened:  # after the totals: a version never promises numbers that are not read yet
                self.metrics.poll()
                more = self.episodes.poll()
            return more or self.version != before

    def _read_changes(self, stamps: dict[str, tuple[int, int]]) -> None:
        if stamps.get(CONFIG_FILE) != self._stamps.get(CONFIG_FILE):
            self.config, self.unread = self._read_config()
        self._stamps = stamps
        with suppress(InputError):  # what was read before stays
            self.info = read_run(self.folder)
        if self._tail.was_cut():
            self.totals = Totals(best_metric(self.info))
        for _, line in self._tail.lines():
            self.totals.add(line)

    def signs(self) -> list[Sign]:
        """Of a run that is open."""
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

    def state(self) -> dict[str, Any]:
        """What the table of runs tells of it."""
        with self.lock:
            info, curve = self.info, self.curve
            done, total, pace = self.totals.steps, info["total_steps"], self.totals.pace
            running = info["status"] == "running"
            best, last = self._best()
            quiet = self._quiet()
            return {name: info.get(name) for name in SHOWN} | {
                "id": self.number,
                "name": self.name,
                "label": self.label,
                "kind": info.get("kind", "rl"),
                "curve": {"key": curve.key, "best": curve.best, "name": curve.name, "falls": curve.falls}
                | {"measure": self.measure()},
                "done": done,
                "total": total,
                "seconds": self.totals.seconds,
                "eta": pace * (total - done) if running and pace is not None else None,
                "silent": quiet if running and quiet > max(PATIENCE, SILENT * (pace or 0.0)) else None,
                "best": best,
                "last": last,
                "episodes": len(self.episodes),
                "indexed": self.episodes.indexed,
                "version": self.version,
                "broken": self.broken(),
            }

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
        return self.curve.measure(value for _, value in self.totals.evaluations)

    def _best(self) -> tuple[dict[str, float] | None, dict[str, float] | None]:
        """The first of the best evaluations, and the last one."""
        points = self.totals.evaluations
        if not points:
            return None, None
        best = (min if self.curve.falls else max)(points, key=lambda point: point[1])
        return self._point(*best), self._point(*points[-1])

    def _point(self, step: int, value: float) -> dict[str, float]:
        found = {"step": int(step), "value": float(value)}
        if self.tasks and self.measure() == "accuracy":
            found["low"], found["high"] = wilson(float(value), self.tasks)
        return found

    def _quiet(self) -> float:
        written = (self._stamps.get(name, (0, 0))[0] for name in (METRICS_FILE, INFO_FILE))
        return time.time() - max(written) / 1e9


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
        if found:
            self._label()

    def poll(self) -> bool:
        """One round over all runs; whether anything was new."""
        self.look()
        changed, errors = False, []
        configs = [run.config for run in self.runs]
        for run in self.runs:
            try:
                changed |= not run.gone and run.poll()
            except (OSError, ValueError) as error:  # one run's trouble is not the others'
                errors.append(error)
        if any(run.config is not before for run, before in zip(self.runs, configs, strict=True)):
            self._label()
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

    def _label(self) -> None:
        """Names that say what differs between the runs that are there."""
        algorithms, experiments = (
            [str(run.info.get(name, "")) for run in self.runs] for name in ("algorithm", "experiment")
        )
        names = run_names([run.config for run in self.runs], algorithms, experiments)
        for run, name in zip(self.runs, names, strict=True):
            run.label = name

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
