"""covey dash, report, runs, watch and export: looks at finished and running runs, and exports their models."""

from __future__ import annotations

import sys
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from covey.app.resume import find_model
from covey.cli.parse import parse
from covey.errors import InputError
from covey.telemetry.base import RunInfo, Sink
from covey.telemetry.history import Record, read_run
from covey.telemetry.jsonl import METRICS_FILE, read_record
from covey.telemetry.key_metrics import ABSENT, Format, format_duration, format_value

DASH = """\
covey dash [RUNS...] [--port 8765] [--open]

  A page over one or many runs, updated live: curves, comparison, episodes token by token, rewards and diagnostics. It
  serves this machine only: open the printed link, which contains a token. Ctrl-C ends it.
  RUNS           run folders (outputs/DATE/TIME), or folders that contain some; default: outputs
  --port 8765    default: any free port
  --open         also open a browser

  On another machine:  ssh -L 8765:localhost:8765 MACHINE    and there:  covey dash --port 8765
"""
REPORT = """\
covey report RUN... [--out FILE] [--episodes 200] [--markdown]

  The page of covey dash as one HTML file, which needs no server and no network; or Markdown for a pull request.
  --out FILE        default RUN/report.html; Markdown is printed
  --episodes 200    the number of episodes in the file, in whole groups over the whole run
"""


def main_dash(argv: list[str]) -> int:
    args = parse(argv, switches=("--open",), values=("--port",))
    from covey.dashboard.runs import Library
    from covey.dashboard.server import Dash

    places = [Path(place) for place in args.positional] or [Path("outputs")]
    library = Library(places)
    library.poll()  # the table is ready before the link is printed
    if len(library.runs) == 1:
        library.runs[0].open()  # the first page shows its metrics
    port = args.integer("--port", 0, least=0)
    try:
        dash = Dash(library, port)
    except OSError as error:
        raise InputError(f"--port {port}: {error.strerror}\n  fix: name another, or none") from error
    with dash:
        count = len(library.runs)
        print(f"{count} run{'s' if count != 1 else ''}\n{dash.link}\nCtrl-C ends it.", flush=True)
        if args.has("--open"):
            webbrowser.open(dash.link)
        dash.wait()
    return 0


def main_report(argv: list[str]) -> int:
    args = parse(argv, switches=("--markdown",), values=("--out", "--episodes"))
    if not args.positional:
        raise InputError(f"name a run\n\n{REPORT.rstrip()}")
    from covey.dashboard.static_page import EPISODES, html_report, markdown_report

    places = [Path(place) for place in args.positional]
    out = args.value("--out")
    if args.has("--markdown"):
        text = "\n".join(markdown_report(place) for place in places)
        if out is None:
            print(text, end="")
            return 0
    else:
        text = html_report(places, args.integer("--episodes", EPISODES, least=0))
    path = Path(out) if out is not None else places[0] / "report.html"
    path.write_text(text, encoding="utf-8")
    print(f"{path}  {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    return 0


# -- covey runs and covey watch ----------------------------------------------------------------------------------------

RUNS = """\
covey runs [FOLDER...]
covey runs tag RUN [TAG...] [--remove TAG,TAG] [--notes TEXT]

  Runs with their status, best score and duration, the newest last. Default folder: outputs
  tag labels a run, also while it runs: tags are added or removed, notes are replaced. covey dash shows them and
  searches by them. Labels at the start of a run: logging.tags=[a,b] logging.notes="..."
"""
WATCH = """\
covey watch RUN

  Follow a run in progress: its console, with every step and evaluation, and diagnostics. Ctrl-C detaches; the run
  continues.
"""
WIDE = 160  # columns, if the output is not a terminal
POLL = 1.0  # seconds


def main_runs(argv: list[str]) -> int:
    if argv[:1] == ["tag"]:
        return main_tag(argv[1:])
    args = parse(argv)
    from covey.dashboard.runs import Library

    library = Library([Path(place) for place in args.positional] or [Path("outputs")])
    library.poll()
    Console(width=None if sys.stdout.isatty() else WIDE, highlight=False).print(
        runs_table([run.state() for run in library.runs])
    )
    for why in [*library.skipped, *(f"{run.name}: {what}" for run in library.runs for what in run.broken())]:
        print(why, file=sys.stderr)
    return 0


def main_tag(argv: list[str]) -> int:
    args = parse(argv, values=("--remove", "--notes"))
    if not args.positional:
        raise InputError(f"name a run\n\n{RUNS.rstrip()}")
    from covey.telemetry.history import write_labels

    folder, added = Path(args.positional[0]), [*args.positional[1:], *args.settings]  # a tag may have a = in it
    run = read_run(folder)
    removed = [tag for tag in (args.value("--remove") or "").split(",") if tag]
    if missing := [tag for tag in removed if tag not in run["tags"]]:
        raise InputError(f"{folder} has no tag {', '.join(missing)}\n  its tags: {', '.join(run['tags']) or 'none'}")
    notes = args.value("--notes")
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
        status = f"silent {format_duration(state['silent'])}" if state["silent"] else state["status"]
        form: Format = "number" if state["curve"]["falls"] else "score"
        best, last = (ABSENT if p is None else format_value(p["value"], form) for p in (state["best"], state["last"]))
        table.add_row(
            escape(state["name"]),
            escape(f"{state['title']}: {state['label']}"),
            escape(status),
            f"{state['done']}/{state['total']}",
            best,
            last,
            format_duration(state["seconds"]),
            format_duration(state["eta"]),
            escape(", ".join(state["tags"])),
        )
    return table


def main_watch(argv: list[str]) -> int:
    watch(Path(parse(argv).one("run", WATCH)), lambda: time.sleep(POLL))
    return 0


def watch(folder: Path, wait: Callable[[], None]) -> None:
    """Show the console of a run, read from its files, until the run ends."""
    from covey.dashboard.metrics import Tail
    from covey.dashboard.runs import Run
    from covey.telemetry.console import open_console
    from covey.telemetry.history import History

    run, tail = Run(0, folder, folder.name), Tail(folder / METRICS_FILE)
    run.open()
    records = [record for _, line in tail.lines() if (record := _record(line)) is not None]
    steps, evaluations = (tuple(record for k, record in records if k == kind) for kind in ("step", "eval"))
    console = open_console(_info(folder, run.info), "info", History(steps, evaluations))
    reported: set[str] = set()
    status = "interrupted"
    try:
        while True:
            current = _status(folder)  # before the files are read, so that no later record is missed
            if tail.was_cut():
                console.note("the run was resumed from a checkpoint")
            for _, line in tail.lines():
                _show_record(console, line)
            run.poll()
            for finding in run.findings():
                if finding.name not in reported:
                    reported.add(finding.name)
                    console.warn(f"{finding.title}. {finding.sentence}")
            if current != "running":
                status = current
                return
            wait()
    finally:
        console.close(status)


def _status(folder: Path) -> str:
    """The run's status; `gone` if its folder was deleted or damaged."""
    try:
        return str(read_run(folder)["status"])
    except InputError:
        return "gone"


def _show_record(console: Sink, line: bytes) -> None:
    if (parsed := _record(line)) is None:
        return
    kind, record = parsed
    if kind == "step":
        console.step(record.step, record.metrics, None, ())
    else:
        console.evaluation(record.step, record.metrics, None)


def _record(line: bytes) -> tuple[str, Record] | None:
    """The record of a line; None if it is damaged (the dashboard counts those)."""
    try:
        kind, step, metrics = read_record(line)
    except ValueError:
        return None
    return kind, Record(step, {name: value for name, value in metrics.items() if value is not None})


def _info(folder: Path, run: dict[str, Any]) -> RunInfo:
    names = ("title", "algorithm", "model", "task", "total_steps", "trained_reward")
    rewards = tuple(run["reward_names"])
    return RunInfo(folder, **{name: run[name] for name in names}, reward_names=rewards, kind=run.get("kind", "rl"))


# -- covey export ------------------------------------------------------------------------------------------------------

USAGE = """\
covey export CHECKPOINT_OR_RUN OUT [--dtype bfloat16] [--adapter]

  Writes a model folder that other programs load: safetensors (several files for large models), configuration,
  tokenizer. Of a run, the checkpoint with the best evaluation, or the last one. An adapter (model.lora) is merged into
  the weights that it was trained on.
  --dtype NAME    float32, bfloat16 or float16; default: as trained
  --adapter       write only the adapter, for programs that load it on top of its base model

  covey export outputs/2026-01-31/14-05-09 my-model --dtype bfloat16
"""


def main(argv: list[str]) -> int:
    args = parse(argv, switches=("--adapter",), values=("--dtype",))
    if len(args.positional) != 2 or args.settings:
        raise InputError(f"name a checkpoint or a run, and the folder to write\n\n{USAGE.rstrip()}")
    out = Path(args.positional[1]).expanduser()
    folder = find_model(args.positional[0])
    from covey.learner.saving import check_export, export

    options = {"dtype": args.value("--dtype"), "adapter": args.has("--adapter")}
    check_export(folder, out, **options)  # type: ignore[arg-type]
    written = export(folder, out, **options)  # type: ignore[arg-type]
    print(f"{folder} → {out}\n  {written}")
    return 0
