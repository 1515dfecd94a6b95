"""covey runs and covey watch: runs on the console."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from covey.cli.words import parse
from covey.errors import InputError
from covey.telemetry.base import RunInfo, Sink
from covey.telemetry.figures import ABSENT, Form, duration, show
from covey.telemetry.history import Record, read_run
from covey.telemetry.jsonl import METRICS_FILE, read_record

RUNS = """\
covey runs [FOLDER...]
covey runs tag RUN [TAG...] [--remove TAG,TAG] [--notes TEXT]

  Runs with their status, best score and duration, the newest last. Without a folder: outputs
  tag labels a run, also while it is going: tags are added or removed, notes are replaced. covey dash shows them, and
  finds runs by them. A run can be started with labels too: logging.tags=[a,b] logging.notes="..."
"""
WATCH = """\
covey watch RUN

  Attach to a run that is going: its console, with every step and evaluation as it is made, and what looks wrong.
  Ctrl-C leaves; the run goes on.
"""
WIDE = 160  # columns, where no screen says otherwise
LOOK = 1.0  # seconds


def main_runs(argv: list[str]) -> int:
    if argv[:1] == ["tag"]:
        return main_tag(argv[1:])
    words = parse(argv)
    if words.help:
        print(RUNS)
        return 0
    from covey.dash.runs import Library

    library = Library([Path(place) for place in words.places] or [Path("outputs")])
    library.poll()
    Console(width=None if sys.stdout.isatty() else WIDE, highlight=False).print(
        runs_table([run.state() for run in library.runs])
    )
    for why in [*library.left_out, *(f"{run.name}: {what}" for run in library.runs for what in run.broken())]:
        print(why, file=sys.stderr)
    return 0


def main_tag(argv: list[str]) -> int:
    words = parse(argv, values=("--remove", "--notes"))
    if words.help:
        print(RUNS)
        return 0
    if not words.places:
        raise InputError(f"name a run\n\n{RUNS.rstrip()}")
    from covey.telemetry.labels import write_labels

    folder, added = Path(words.places[0]), [*words.places[1:], *words.settings]  # a tag may have a = in it
    run = read_run(folder)
    removed = [tag for tag in (words.text("--remove") or "").split(",") if tag]
    if missing := [tag for tag in removed if tag not in run["tags"]]:
        raise InputError(f"{folder} has no tag {', '.join(missing)}\n  its tags: {', '.join(run['tags']) or 'none'}")
    notes = words.text("--notes")
    tags = [tag for tag in dict.fromkeys([*run["tags"], *added]) if tag not in removed]
    write_labels(folder, tags, run["notes"] if notes is None else notes)
    print(f"{folder}  tags: {', '.join(tags) or 'none'}" + (f"  notes: {notes}" if notes else ""))
    return 0


def runs_table(states: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("run", "what", "status", "steps", "best", "now", "took", "left", "tags"):
        words = heading in ("run", "what", "status", "tags")
        table.add_column(heading, justify="left" if words else "right", no_wrap=heading != "what")
    for state in states:
        status = f"silent {duration(state['silent'])}" if state["silent"] else state["status"]
        form: Form = "number" if state["curve"]["falls"] else "score"
        best, last = (ABSENT if p is None else show(p["value"], form) for p in (state["best"], state["last"]))
        table.add_row(
            escape(state["name"]),
            escape(f"{state['title']}: {state['label']}"),
            escape(status),
            f"{state['done']}/{state['total']}",
            best,
            last,
            duration(state["seconds"]),
            duration(state["eta"]),
            escape(", ".join(state["tags"])),
        )
    return table


def main_watch(argv: list[str]) -> int:
    words = parse(argv)
    if words.help:
        print(WATCH)
        return 0
    if len(words.places) != 1:
        raise InputError(f"name one run\n\n{WATCH.rstrip()}")
    watch(Path(words.places[0]), lambda: time.sleep(LOOK))
    return 0


def watch(folder: Path, rest: Callable[[], None]) -> None:
    """Until the run is over: the console that the run itself has, fed from its files."""
    from covey.dash.runs import Run
    from covey.dash.tail import Tail
    from covey.telemetry.console import open_console
    from covey.telemetry.history import History

    run, tail = Run(0, folder, folder.name), Tail(folder / METRICS_FILE)
    run.open()
    records = [record for _, line in tail.lines() if (record := _record(line)) is not None]
    found = {kind: tuple(record for its, record in records if its == kind) for kind in ("step", "eval")}
    console = open_console(_info(folder, run.info), "info", History(found["step"], found["eval"]))
    told: set[str] = set()
    status = "interrupted"
    try:
        while True:
            over = _status(folder)  # before the files are read: nothing that is written later is missed
            if tail.was_cut():
                console.note("the run was resumed from a checkpoint")
            for _, line in tail.lines():
                _pass_on(console, line)
            run.poll()
            for sign in run.signs():
                if sign.name not in told:
                    told.add(sign.name)
                    console.warn(f"{sign.title}. {sign.sentence}")
            if over != "running":
                status = over
                return
            rest()
    finally:
        console.close(status)


def _status(folder: Path) -> str:
    """The run's, or that it is gone: its folder may be deleted, or damaged, while somebody watches."""
    try:
        return str(read_run(folder)["status"])
    except InputError:
        return "gone"


def _pass_on(console: Sink, line: bytes) -> None:
    if (found := _record(line)) is None:
        return
    kind, record = found
    if kind == "step":
        console.step(record.step, record.metrics, None, ())
    else:
        console.evaluation(record.step, record.metrics, None)


def _record(line: bytes) -> tuple[str, Record] | None:
    """None: it is no record; the page of the run counts those."""
    try:
        kind, step, metrics = read_record(line)
    except ValueError:
        return None
    return kind, Record(step, {name: value for name, value in metrics.items() if value is not None})


def _info(folder: Path, run: dict[str, Any]) -> RunInfo:
    names = ("title", "algorithm", "model", "task", "total_steps", "trained_reward")
    rewards = tuple(run["reward_names"])
    return RunInfo(folder, **{name: run[name] for name in names}, reward_names=rewards, kind=run.get("kind", "rl"))
