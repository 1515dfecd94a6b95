"""covey report: the dashboard with its data as one HTML file, or Markdown for a pull request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.config.read import load_yaml
from covey.dashboard.api import Api
from covey.dashboard.diagnostics import too_early
from covey.dashboard.episodes import Query
from covey.dashboard.metrics import is_own_file
from covey.dashboard.runs import Library, Run
from covey.dashboard.server import SCRIPTS, SCRIPTS_MARK, page_file
from covey.redact import hide_known, hide_words
from covey.telemetry.jsonl import finite
from covey.telemetry.key_metrics import format_duration
from covey.telemetry.report import Summary, change_table, code, plain, summarise

EPISODES = 200  # in the file, evenly over the run
SCATTER_COLUMNS = ("length", "reward", "step")
EMPTY_SCATTER: dict[str, Any] = {"names": [], "total": 0, "correlation": None, "x": [], "y": [], "id": [], "step": []}
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def html_report(folders: Sequence[Path], episodes: int = EPISODES) -> str:
    """The page of `covey dash` as one file, which needs neither a server nor a network."""
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
    # "<" is escaped, since it could end the script element with the data.
    inline = hide_known(json.dumps(finite(data), separators=(",", ":"), default=str)).replace("<", "\\u003c")
    return page.replace(SCRIPTS_MARK, f'<script type="application/json" id="inline">{inline}</script>\n{scripts}')


def read_all(library: Library) -> None:
    """Read all records of all runs."""
    for run in library.runs:
        run.open()
        while run.poll():
            pass


def _run_data(api: Api, run: Run, most: int) -> dict[str, Any]:
    params = {"run": str(run.number)}
    info = api.run(params)
    indices = [int(index) for index in run.episodes.find(Query(descending=False))]
    stride = max(1, -(-len(indices) // most))
    kept = _whole_groups(run, indices[::stride], most) if stride > 1 else indices
    names = [name for name in run.episodes.names() if name.startswith("reward:") or name in SCATTER_COLUMNS]
    pairs = [(x, y) for x in names for y in names if x != y and len(run.episodes)]
    return {
        "run": info,
        "series": {
            kind: api.series(params | {"kind": kind, "names": ",".join(names)}) for kind, names in info["names"].items()
        },
        "rows": [run.episodes.row(index) for index in kept],
        "episodes": {index: run.episodes.read(index) for index in kept},
        "recorded": len(run.episodes),
        "stops": run.episodes.stops.all,
        "scatter": {f"{x}|{y}": _scatter(api, params, x, y, names, set(kept)) for x, y in pairs}
        or {"length|reward": EMPTY_SCATTER},
    }


def _whole_groups(run: Run, picked: Sequence[int], most: int) -> list[int]:
    """The groups of the picked episodes, until there are `most` episodes."""
    kept: dict[int, None] = {}
    for index in picked[:: max(1, len(run.episodes.related(picked[0], group=True)))]:
        if len(kept) < most:
            kept |= dict.fromkeys(run.episodes.related(index, group=True))
    return sorted(kept)


def _scatter(api: Api, params: dict[str, str], x: str, y: str, names: list[str], kept: set[int]) -> dict[str, Any]:
    """Dots of the episodes in this file; the correlation is over all."""
    data = api.scatter(params | {"x": x, "y": y})
    indices = [i for i, episode in enumerate(data["id"]) if episode in kept]
    picked = {name: [data[name][i] for i in indices] for name in ("x", "y", "step", "id")}
    return data | picked | {"names": names}


def markdown_report(folder: Path) -> str:
    """Results, findings and changed settings of a run."""
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
        _findings(run),
        _changed(run),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _results(summary: Summary, run: Run) -> str:
    lines, last = change_table(summary), run.state()["last"]
    if summary.changes and last is not None and "low" in last:
        lines += ["", f"95 % interval of the last `eval/accuracy`: {last['low']:.3f} to {last['high']:.3f}."]
    return "\n".join(lines)


def _findings(run: Run) -> str:
    if early := too_early(run.totals.steps):
        return early
    lines = [
        f"- **{f.title}.** {f.sentence} {f.advice} Settings: {', '.join(f'`{s}`' for s in f.settings)}."
        for f in run.findings()
    ]
    return "\n".join(["### Findings", "", *lines]) if lines else "No findings."


def _changed(run: Run) -> str:
    """The settings of the command line, if they were recorded."""
    path = run.folder / ".hydra" / "overrides.yaml"
    overrides = load_yaml(path) if is_own_file(path) else []
    overrides = hide_words([str(word) for word in overrides]) if isinstance(overrides, list) else []
    return "Settings: " + " ".join(map(code, overrides)) if overrides else ""
