"""Run folders for the dashboard: `Run` follows the files of one run, `Library` those of all runs.

Totals, which are cheap, are followed for every run. Metrics and episodes are read once a run is opened, and followed
from then on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import Any

from covey.config.read import load_yaml
from covey.dashboard.diagnostics import Evidence, Finding, diagnose
from covey.dashboard.differences import run_names
from covey.dashboard.episodes import EpisodeIndex
from covey.dashboard.metrics import Metrics, Tail, is_own_file
from covey.errors import InputError
from covey.evaluation.statistics import wilson
from covey.redact import hide, hide_settings
from covey.telemetry.base import flatten
from covey.telemetry.history import LABELS_FILE, SUMMARY_FILE, Totals, best_metric, read_run, read_totals
from covey.telemetry.jsonl import METRICS_FILE
from covey.telemetry.key_metrics import Curve, curve_of, is_stage

INFO_FILE, CONFIG_FILE = "run.json", "config.yaml"
TABLE_FIELDS = (  # of run.json, in the table of runs
    *("title", "algorithm", "model", "task", "status", "started", "trained_reward", "reward_names", "tags", "notes"),
)

SILENT_STEPS = 10.0  # median steps without output until a running run is shown as silent
SILENT_SECONDS = 120.0  # at least
SEARCH_SECONDS = 5.0  # between two searches for new runs
MAX_TASKS = 1 << 40

# Settings of many runs repeat the same strings. The server hides known secrets in its responses once more.
_hide = lru_cache(maxsize=4096)(hide)


class Run:
    """The files of one run. Hold its lock while reading, because the follower thread updates it."""

    def __init__(self, number: int, folder: Path, name: str) -> None:
        self.number, self.folder, self.name = number, folder, name
        self.lock = RLock()
        self.label = name  # how it differs from other runs; set by the library
        self.metrics, self.episodes = Metrics(folder), EpisodeIndex(folder)
        self.info = read_run(folder)
        self.config, self.config_errors = self._read_config()
        self.deleted = False
        self.opened = False
        self._findings: tuple[Any, list[Finding]] | None = None
        self._tail = Tail(folder / METRICS_FILE)
        self._stamps = self._stamp()
        own = is_own_file(folder / SUMMARY_FILE) and is_own_file(folder / METRICS_FILE)
        stored = read_totals(folder, best_metric(self.info)) if own else None
        self.totals = stored or Totals(best_metric(self.info))
        if stored is not None:
            self._tail.skip_to(stored.size)

    @property
    def curve(self) -> Curve:
        return curve_of(self.info.get("kind", "rl"), self.info["trained_reward"])

    @property
    def version(self) -> str:
        """A value that changes with new metrics, status or labels."""
        return f"{self._tail.cuts}.{self._tail.offset}.{self.info['status']}.{self._stamps.get(LABELS_FILE, (0,))[0]}"

    @property
    def tasks(self) -> int | None:
        """Validation tasks per evaluation, if known."""
        count = self.info.get("held_out") or self.config.get("data.val_size")
        return count if isinstance(count, int) and 0 < count < MAX_TASKS else None

    def broken(self) -> list[str]:
        """Messages about files and lines that could not be read."""
        broken = max(self.totals.broken, self.metrics.broken)
        lines = ((METRICS_FILE, broken), ("episodes.jsonl", self.episodes.broken))
        counts = [f"{name}: {count} lines cannot be read and are skipped" for name, count in lines if count]
        return [*self.config_errors, *counts]

    def _read_config(self) -> tuple[dict[str, Any], list[str]]:
        """The settings by dotted name, and error messages."""
        path = self.folder / CONFIG_FILE
        try:
            tree = load_yaml(path) if is_own_file(path) else {}
            return (flatten(hide_settings(tree, text=_hide)) if isinstance(tree, dict) else {}), []
        except InputError as error:
            return {}, [str(error).splitlines()[0]]

    def _stamp(self) -> dict[str, tuple[int, int]]:
        """Modification time and size of each followed file, to skip unchanged ones."""
        stamps = {}
        for name in (INFO_FILE, METRICS_FILE, CONFIG_FILE, LABELS_FILE):
            with suppress(OSError):
                stat = (self.folder / name).stat()
                stamps[name] = (stat.st_mtime_ns, stat.st_size)
        return stamps

    def open(self) -> None:
        """Read the metrics on the first call; metrics and episodes are followed from then on."""
        with self.lock:
            if not self.opened:
                self.opened = True
                self.metrics.poll()

    def poll(self) -> bool:
        """Read what is new: totals, and for an opened run metrics and a chunk of the episodes."""
        with self.lock:
            before, stamps = self.version, self._stamp()
            if INFO_FILE not in stamps:
                self.deleted = True  # data that was read is kept
                return False
            # A killed run leaves its files unchanged; only its lock shows that it ended.
            if stamps != self._stamps or self.info["status"] == "running" or not self._tail.offset:
                self._read_changes(stamps)
            more = False
            if self.opened:  # after the totals, so that a version never promises metrics that are not read yet
                self.metrics.poll()
                more = self.episodes.poll()
            return more or self.version != before

    def _read_changes(self, stamps: dict[str, tuple[int, int]]) -> None:
        if stamps.get(CONFIG_FILE) != self._stamps.get(CONFIG_FILE):
            self.config, self.config_errors = self._read_config()
        self._stamps = stamps
        with suppress(InputError):  # keep what was read before
            self.info = read_run(self.folder)
        if self._tail.was_cut():
            self.totals = Totals(best_metric(self.info))
        for _, line in self._tail.lines():
            self.totals.add(line)

    def findings(self) -> list[Finding]:
        """The findings of an opened run."""
        with self.lock:
            version = (self.metrics.version, len(self.episodes) // 1000)
            if self._findings is None or self._findings[0] != version:
                self._findings = (version, diagnose(self.evidence()))
            return self._findings[1]

    def evidence(self) -> Evidence:
        steps, evals = self.metrics.tables["step"], self.metrics.tables["eval"]
        return Evidence(
            {name: steps.points(name) for name in steps.names()},
            {name: evals.points(name) for name in evals.names()},
            self.tasks,
            self.episodes.column("length") if len(self.episodes) else None,
            self.episodes.column("reward") if len(self.episodes) else None,
            self.config,
        )

    def state(self) -> dict[str, Any]:
        """Its row in the table of runs."""
        with self.lock:
            info, curve = self.info, self.curve
            done, total, pace = self.totals.steps, info["total_steps"], self.totals.pace
            running = info["status"] == "running"
            points = self.totals.evaluations
            best = (min if curve.falls else max)(points, key=lambda point: point[1]) if points else None
            written = max(self._stamps.get(name, (0, 0))[0] for name in (METRICS_FILE, INFO_FILE))
            quiet = time.time() - written / 1e9
            return {name: info.get(name) for name in TABLE_FIELDS} | {
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
                "silent": quiet if running and quiet > max(SILENT_SECONDS, SILENT_STEPS * (pace or 0.0)) else None,
                "best": self._point(*best) if best else None,
                "last": self._point(*points[-1]) if points else None,
                "episodes": len(self.episodes),
                "indexed": self.episodes.indexed,
                "version": self.version,
                "broken": self.broken(),
            }

    def stages(self) -> dict[str, float]:
        """Seconds of each stage over the whole run, longest first."""
        seconds: dict[str, float] = {}
        for table in self.metrics.tables.values():
            for name in table.names():
                if is_stage(name):
                    stage = name.removeprefix("timing/")
                    seconds[stage] = seconds.get(stage, 0.0) + float(table.points(name)[1].sum())
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def failures(self) -> dict[str, float]:
        """Failed episodes by cause."""
        table, start = self.metrics.tables["step"], "episodes/failed/"
        causes = [name for name in table.names() if name.startswith(start)]
        return {name.removeprefix(start): float(table.points(name)[1].sum()) for name in causes}

    def measure(self) -> str:
        """What to call the values of its evaluations."""
        return self.curve.measure(value for _, value in self.totals.evaluations)

    def _point(self, step: int, value: float) -> dict[str, float]:
        point = {"step": int(step), "value": float(value)}
        if self.tasks and self.measure() == "accuracy":
            point["low"], point["high"] = wilson(float(value), self.tasks)
        return point


class Library:
    """The given runs, and those that appear in the given folders. A run keeps its number."""

    def __init__(self, places: Sequence[Path]) -> None:
        self.places = list(places)
        self.runs: list[Run] = []
        self.skipped: list[str] = []  # errors of folders that look like runs but cannot be read
        self._known: set[Path] = set()
        self._searched: float | None = None
        self.search()
        if not self.runs:
            errors = "".join(f"\n  {error}" for error in self.skipped)
            raise InputError(
                f"no run found in {', '.join(map(str, self.places))}{errors}\n"
                "  give run folders (outputs/DATE/TIME), or a folder that contains some"
            )

    def search(self) -> None:
        """Add new runs, the newest last. Only every few seconds, since walking many folders takes time."""
        if self._searched is not None and time.monotonic() - self._searched < SEARCH_SECONDS:
            return
        self._searched = time.monotonic()
        places = [place for place in self.places if self._known == set() or place.is_dir()]
        new = [folder for folder in run_folders(places) if folder not in self._known]
        for folder in new:
            self._known.add(folder)
            try:
                self.runs.append(Run(len(self.runs), folder, self._name(folder)))
            except InputError as error:  # one damaged folder does not hide the others
                self.skipped.append(str(error))
        if new:
            self._label()

    def poll(self) -> bool:
        """Poll all runs; returns whether anything was new."""
        self.search()
        changed, errors = False, []
        configs = [run.config for run in self.runs]
        for run in self.runs:
            try:
                changed |= not run.deleted and run.poll()
            except (OSError, ValueError) as error:  # do not stop at one run
                errors.append(error)
        if any(run.config is not before for run, before in zip(self.runs, configs, strict=True)):
            self._label()
        if errors:
            raise errors[0]
        return changed

    def comparisons(self) -> list[dict[str, Any]]:
        """Comparisons by `covey eval` in the given folders or beside the runs."""
        around = {*self.places, *(place / "eval" for place in self.places)}
        around |= {run.folder.parent.parent / "eval" for run in self.runs}
        files = {
            file.resolve()
            for place in around
            for file in (*place.glob("results.json"), *place.glob("*/results.json"))
            if is_own_file(file)
        }
        comparisons: list[dict[str, Any]] = []
        for file in sorted(files):
            with suppress(ValueError, LookupError, TypeError, OSError, RecursionError):  # incomplete, or not ours
                comparisons += json.loads(file.read_text())["comparisons"]
        return comparisons

    def _label(self) -> None:
        algorithms, experiments = (
            [str(run.info.get(name, "")) for run in self.runs] for name in ("algorithm", "experiment")
        )
        names = run_names([run.config for run in self.runs], algorithms, experiments)
        for run, name in zip(self.runs, names, strict=True):
            run.label = name

    def _name(self, folder: Path) -> str:
        """The path below the given folder, or the last two parts."""
        for place in self.places:
            if place != folder and folder.is_relative_to(place):
                return str(folder.relative_to(place))
        return "/".join(folder.resolve().parts[-2:])


def run_folders(places: Iterable[Path]) -> list[Path]:
    """The run folders in `places` by start time, each once. Hidden folders are not searched."""
    started: dict[Path, str] = {}
    for place in places:
        if not os.path.isdir(place):  # False also for a name that is too long
            raise InputError(f"{str(place)[:200]!r}: no such folder")
        for root, folders, files in os.walk(place):
            folder = Path(root)
            if "run.json" in files and is_own_file(folder / "run.json") and folder not in started:
                started[folder] = ""
                with suppress(InputError):  # reported when the run is opened
                    started[folder] = str(read_run(folder).get("started", ""))
            # A run folder contains no runs, only many files.
            folders[:] = [] if "run.json" in files else [name for name in folders if not name.startswith(".")]
    return sorted(started, key=lambda folder: (started[folder], str(folder)))
