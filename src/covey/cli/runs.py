"""covey dash and covey report: runs on a page, live in a browser or as one file."""

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

from covey.app.resume import best_model, is_run, named_model, run_of
from covey.cli.words import parse
from covey.errors import InputError
from covey.telemetry.base import RunInfo, Sink
from covey.telemetry.history import Record, read_run
from covey.telemetry.jsonl import METRICS_FILE, read_record
from covey.telemetry.key_metrics import ABSENT, Format, format_duration, format_value

DASH = """\
covey dash [RUNS...] [--port 8765] [--open]

  A page over one or many runs, live while they are going: curves, comparison, episodes token by token, rewards, and
  what looks wrong. For this machine alone: open the printed link, which carries a token. Ctrl-C ends it.
  RUNS           run folders (outputs/DATE/TIME), or folders that hold some; without any: outputs
  --port 8765    without it any free one
  --open         open a browser too

  On another machine:  ssh -L 8765:localhost:8765 MACHINE    and there:  covey dash --port 8765
"""
REPORT = """\
covey report RUN... [--out FILE] [--episodes 200] [--markdown]

  The page of covey dash as one HTML file, which needs neither a server nor a network; or Markdown for a pull request.
  --out FILE        without it RUN/report.html; Markdown is printed
  --episodes 200    how many episodes are put into the file, in whole groups over the whole run
"""


def main_dash(argv: list[str]) -> int:
    words = parse(argv, switches=("--open",), values=("--port",))
    if words.help:
        print(DASH)
        return 0
    from covey.dashboard.runs import Library
    from covey.dashboard.server import Dash

    places = [Path(place) for place in words.places] or [Path("outputs")]
    library = Library(places)
    library.poll()  # the table is there before the link is
    if len(library.runs) == 1:
        library.runs[0].open()  # the first page shows its numbers
    port = _whole(words.text("--port") or "0", "--port")
    try:
        dash = Dash(library, port)
    except OSError as error:
        raise InputError(f"--port {port}: {error.strerror}\n  fix: name another, or none") from error
    with dash:
        count = len(library.runs)
        print(f"{count} run{'s' if count != 1 else ''}\n{dash.link}\nCtrl-C ends it.", flush=True)
        if words.on("--open"):
            webbrowser.open(dash.link)
        dash.wait()
    return 0


def main_report(argv: list[str]) -> int:
    words = parse(argv, switches=("--markdown",), values=("--out", "--episodes"))
    if words.help:
        print(REPORT)
        return 0
    if not words.places:
        raise InputError(f"name a run\n\n{REPORT.rstrip()}")
    from covey.dashboard.static_page import EPISODES, html_report, markdown_report

    places = [Path(place) for place in words.places]
    out = words.text("--out")
    if words.on("--markdown"):
        text = "\n".join(markdown_report(place) for place in places)
        if out is None:
            print(text, end="")
            return 0
    else:
        most = _whole(words.text("--episodes") or str(EPISODES), "--episodes")
        text = html_report(places, most)
    path = Path(out) if out is not None else places[0] / "report.html"
    path.write_text(text, encoding="utf-8")
    print(f"{path}  {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    return 0


def _whole(text: str, flag: str) -> int:
    if not text.isdigit():
        raise InputError(f"{flag} wants a whole number, not {text!r}")
    return int(text)


# -- covey runs and covey watch: runs on the console -------------------------------------------------------------------

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
    from covey.dashboard.runs import Library

    library = Library([Path(place) for place in words.places] or [Path("outputs")])
    library.poll()
    Console(width=None if sys.stdout.isatty() else WIDE, highlight=False).print(
        runs_table([run.state() for run in library.runs])
    )
    for why in [*library.skipped, *(f"{run.name}: {what}" for run in library.runs for what in run.broken())]:
        print(why, file=sys.stderr)
    return 0


def main_tag(argv: list[str]) -> int:
    words = parse(argv, values=("--remove", "--notes"))
    if words.help:
        print(RUNS)
        return 0
    if not words.places:
        raise InputError(f"name a run\n\n{RUNS.rstrip()}")
    from covey.telemetry.history import write_labels

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
    from covey.dashboard.metrics import Tail
    from covey.dashboard.runs import Run
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
            for finding in run.findings():
                if finding.name not in told:
                    told.add(finding.name)
                    console.warn(f"{finding.title}. {finding.sentence}")
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


# -- covey export: an ordinary model folder out of a run or a checkpoint -----------------------------------------------

USAGE = """\
covey export CHECKPOINT_OR_RUN OUT [--dtype bfloat16] [--adapter]

  Writes a model folder that other programs load: safetensors (in several files where they are large), configuration,
  tokenizer. Of a run, the checkpoint with the best evaluation, or else the last. An adapter (model.lora) is merged into
  the weights that it was trained on.
  --dtype NAME    float32, bfloat16 or float16; without it, as they were trained
  --adapter       write the adapter alone, for programs that load it beside its base model

  covey export outputs/2026-01-31/14-05-09 my-model --dtype bfloat16
"""


def main(argv: list[str]) -> int:
    words = parse(argv, switches=("--adapter",), values=("--dtype",))
    if words.help:
        print(USAGE)
        return 0
    if len(words.places) != 2 or words.settings:
        raise InputError(f"name a checkpoint or a run, and the folder to write\n\n{USAGE.rstrip()}")
    out = Path(words.places[1]).expanduser()
    folder = find_model(words.places[0])
    from covey.learner.saving import check_export, export

    options = {"dtype": words.text("--dtype"), "adapter": words.on("--adapter")}
    check_export(folder, out, **options)  # type: ignore[arg-type]
    written = export(folder, out, **options)  # type: ignore[arg-type]
    print(f"{folder} → {out}\n  {written}")
    return 0


def find_model(name: str) -> Path:
    """The folder with the weights: a run's best checkpoint, the one that was named (its bytes checked), or a model."""
    path = Path(name).expanduser()
    if not path.is_dir():
        raise InputError(f"there is no folder {name}\n  name a run (outputs/DATE/TIME) or one of its checkpoints")
    if is_run(name) and path == run_of(path):
        return best_model(path)
    return named_model(path) if (path / "manifest.json").is_file() else path
