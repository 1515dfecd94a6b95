"""A run as one file: the same page with its numbers inside, and Markdown for a pull request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.config.read import load_yaml
from covey.dashboard.api import Api
from covey.dashboard.diagnostics import too_early
from covey.dashboard.episodes import Query
from covey.dashboard.metrics import at_home
from covey.dashboard.runs import Library, Run
from covey.dashboard.server import MARK, SCRIPTS, page_file
from covey.redact import hide_known, hide_words
from covey.telemetry.jsonl import finite
from covey.telemetry.key_metrics import format_duration
from covey.telemetry.report import Summary, code, plain, summarise

EPISODES = 200  # in the file, evenly over the run's
DOTS = ("length", "reward", "step")
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def html_report(folders: Sequence[Path], episodes: int = EPISODES) -> str:
    """The page of `covey dash`, which then needs neither a server nor a network."""
    library = Library(folders)
    read_all(library)
    api = Api(library)
    numbers = ",".join(str(run.number) for run in library.runs)
    data = {
        "runs": [_run_data(api, run, episodes) for run in library.runs],
        "compare": api.answer("compare", {"runs": numbers}),
    }
    scripts = "\n".join(f"<script>\n{page_file(name)}</script>" for name in SCRIPTS)
    page = page_file("index.html", linked=False)
    page = page.replace('<link rel="stylesheet" href="style.css">', f"<style>\n{page_file('style.css')}</style>")
    page = page.replace("<title>", f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<title>')
    # A < could end the script that holds the data; in JSON it can be written in another way.
    inline = hide_known(json.dumps(finite(data), separators=(",", ":"), default=str)).replace("<", "\\u003c")
    return page.replace(MARK, f'<script type="application/json" id="inline">{inline}</script>\n{scripts}')


def read_all(library: Library) -> None:
    """Everything that is recorded, before anything is asked."""
    for run in library.runs:
        run.open()
        while run.poll():
            pass


def _run_data(api: Api, run: Run, most: int) -> dict[str, Any]:
    asked = {"run": str(run.number)}
    whole = api.run(asked)
    places = run.episodes.find(Query(descending=False))
    stride = max(1, -(-len(places) // most))
    kept = (
        _whole_groups(run, [int(place) for place in places[::stride]], most) if stride > 1 else list(map(int, places))
    )
    names = [name for name in run.episodes.names() if name.startswith("reward:") or name in DOTS]
    pairs = [(x, y) for x in names for y in names if x != y and len(run.episodes)]
    return {
        "run": whole,
        "series": {
            kind: api.series(asked | {"kind": kind, "names": ",".join(whole["names"][kind])}) for kind in whole["names"]
        },
        "rows": [run.episodes.row(place) for place in kept],
        "episodes": {place: run.episodes.read(place) for place in kept},
        "recorded": len(run.episodes),
        "stops": run.episodes.stops.all,
        "scatter": {f"{x}|{y}": _scatter(api, asked, x, y, names, set(kept)) for x, y in pairs}
        or {"length|reward": NO_DOTS},
    }


NO_DOTS: dict[str, Any] = {"names": [], "total": 0, "correlation": None, "x": [], "y": [], "id": [], "step": []}


def _whole_groups(run: Run, picked: Sequence[int], most: int) -> list[int]:
    """Whole groups, so that they can be read side by side: those of the picked episodes, until there are enough."""
    kept: dict[int, None] = {}
    for place in picked[:: max(1, len(run.episodes.like(picked[0], group=True)))]:
        if len(kept) < most:
            kept |= dict.fromkeys(run.episodes.like(place, group=True))
    return sorted(kept)


def _scatter(api: Api, asked: dict[str, str], x: str, y: str, names: list[str], kept: set[int]) -> dict[str, Any]:
    """Only of what can be opened in this file; the correlation is that of all."""
    found = api.scatter(asked | {"x": x, "y": y})
    there = [place for place, number in enumerate(found["id"]) if number in kept]
    picked = {name: [found[name][place] for place in there] for name in ("x", "y", "step", "id")}
    return found | picked | {"names": names}


def markdown_report(folder: Path) -> str:
    """What a reviewer wants to know of a run, in a page."""
    library = Library([folder])
    read_all(library)
    run, summary = library.runs[0], summarise(folder)
    info = run.info
    what = f"**{plain(info['algorithm'])}** trains **{plain(info['model'])}** on **{plain(info['task'])}**"
    of, status = plain(info["total_steps"]), plain(info["status"])
    parts = [
        f"## {plain(info['title'])}",
        f"{what}: {summary.steps} of {of} steps, {status}, {format_duration(run.totals.seconds)}.",
        _results(summary, run),
        _signs(run),
        _changed(run),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _results(summary: Summary, run: Run) -> str:
    lines = ["| metric | before | after | change |", "|---|---:|---:|---:|"]
    lines += [
        f"| {code(key)} | {' | '.join(cells)} |" for key, *cells in (change.cells() for change in summary.changes)
    ]
    last = run.state()["last"]
    if last is not None and "low" in last:
        lines += ["", f"95 % interval of the last `eval/accuracy`: {last['low']:.3f} to {last['high']:.3f}."]
    return "\n".join(lines) if summary.changes else "The run was not evaluated."


def _signs(run: Run) -> str:
    if early := too_early(run.totals.steps):
        return early
    found = run.signs()
    if not found:
        return "No warning signs."
    lines = [
        f"- **{sign.title}.** {sign.sentence} {sign.advice} Settings: {', '.join(f'`{s}`' for s in sign.settings)}."
        for sign in found
    ]
    return "\n".join(["### Warning signs", "", *lines])


def _changed(run: Run) -> str:
    """The settings that were given on the command line, where they are kept."""
    path = run.folder / ".hydra" / "overrides.yaml"
    given = load_yaml(path) if at_home(path) else []
    given = hide_words([str(word) for word in given]) if isinstance(given, list) else []
    return "Settings: " + " ".join(map(code, given)) if given else ""
