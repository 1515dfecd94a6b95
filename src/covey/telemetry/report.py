"""The report at the end of a run: summary.md, summary.json and curve.png, made from run.json and metrics.jsonl.

Titles, names and commands come from users. `plain`, `code` and `block` escape them, so that they never become HTML,
links, images, headings or table cells.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from covey.storage import write_atomically
from covey.telemetry.charts import compare_curves, curve_figure, draw_curve, render
from covey.telemetry.history import History, Points, read_history, read_run, write_totals
from covey.telemetry.key_metrics import (
    ABSENT,
    Curve,
    curve_of,
    evaluation_format,
    format_duration,
    format_value,
    is_stage,
)

__all__ = ["Change", "Summary", "compare_curves", "curve_figure", "html_summary", "print_summary", "summarise"]
__all__ += ["write_report"]

ENDS = 5  # steps that the first and the last reward are averaged over

_SPECIAL = re.compile(r"[\\`*|]|\](?=[(\[:])|(?<!\w)[_~]|[_~](?!\w)")  # brackets alone, as of an interval, are no link


def plain(value: object) -> str:
    """Escaped text within a line."""
    return escape(_SPECIAL.sub(lambda match: f"\\{match[0]}", " ".join(str(value).split())), quote=False)


def code(value: object) -> str:
    """A code span. Pipes are escaped, since Markdown splits a table into cells first."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    ticks = _fence(text, 1)
    space = " " if text.startswith("`") or text.endswith("`") or not text else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def block(value: object, language: str = "") -> str:
    """A code block."""
    ticks = _fence(str(value), 3)
    return f"{ticks}{language}\n{value}\n{ticks}"


def _fence(text: str, least: int) -> str:
    """More backticks in a row than the text has."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    return "`" * max(least, longest + 1)


@dataclass(frozen=True, slots=True)
class Change:
    """An evaluation metric before training and at the last evaluation; None if not measured.

    Shares (all values in [0, 1]) are shown in percent.
    """

    key: str
    before: float | None
    after: float | None
    share: bool

    def cells(self) -> tuple[str, str, str, str]:
        return self.key, self.format(self.before), self.format(self.after), self._difference()

    def format(self, value: float | None) -> str:
        if value is None:
            return ABSENT
        return f"{100 * value:.1f} %" if self.share else f"{value:.2f}"

    def _difference(self) -> str:
        if self.before is None or self.after is None:
            return ABSENT
        change = self.after - self.before
        return f"{100 * change:+.1f} points" if self.share else f"{change:+.2f}"


@dataclass(frozen=True, slots=True)
class Summary:
    """Every number of the report."""

    run: dict[str, Any]
    curve: Curve
    steps: int
    changes: tuple[Change, ...]
    ends: int  # steps that `first` and `last` are averaged over
    first: float | None  # mean reward or loss at the start of the run
    last: float | None
    best_step: tuple[int, float] | None  # counted from 1; its mean reward or loss
    best_evaluation: tuple[int, float] | None  # updates done; value of `headline`
    headline: str  # eval/accuracy or eval/loss; the metric of the trained reward if that is not a share
    last_evaluation: int | None  # updates done
    tokens: float
    stage_seconds: dict[str, float]  # longest first

    @property
    def seconds(self) -> float:
        return sum(self.stage_seconds.values())


def summarise(folder: Path) -> Summary:
    run, history = read_run(folder), read_history(folder)
    curve = curve_of(run.get("kind", "rl"), run["trained_reward"])
    steps = history.training(curve.key)
    ends = min(ENDS, max(1, len(steps) // 2))
    best = _best(steps, curve)
    headline = _headline(history, curve)
    return Summary(
        run=run,
        curve=curve,
        steps=len(history.steps),
        changes=_changes(history, curve, without=curve.best if headline != curve.best else ""),
        ends=ends,
        first=_mean(steps[:ends]),
        last=_mean(steps[-ends:]),
        best_step=(best[0] + 1, best[1]) if best else None,
        best_evaluation=_best(history.evaluated(curve.best), curve),
        headline=headline,
        last_evaluation=max((record.step for record in history.evaluations), default=None),
        tokens=history.total("perf/generated_tokens"),
        stage_seconds=_stage_seconds(history),
    )


def write_report(folder: Path, status: str | None = None) -> Path:
    """Write curve.png, summary.json and summary.md into FOLDER; returns the last. `status` overrides run.json's."""
    draw_curve(folder, folder / "curve.png")
    path, summary = folder / "summary.md", summarise(folder)
    write_totals(folder, summary.run)
    write_atomically(path, _markdown(summary, folder, status))
    return path


def print_summary(folder: Path, console: Console | None = None) -> None:
    """Print the main results of the report at the end of a run."""
    console = console or Console()
    summary = summarise(folder)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for change in summary.changes:
        table.add_row(*change.cells(), style="" if change.key == summary.headline else "dim")
    console.print()
    if summary.changes:
        console.print(table)
    for line in _facts(summary):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"report: {folder / 'summary.md'}", markup=False, highlight=False, soft_wrap=True)


def html_summary(folder: Path) -> str:
    """The main results with the curve as HTML, for a notebook."""
    summary = summarise(folder)
    run = summary.run
    rows = [change.cells() for change in summary.changes]
    table = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    head = "<tr><th></th><th>before</th><th>after</th><th>change</th></tr>"
    picture = base64.b64encode(render(curve_figure(folder), "png")).decode()
    parts = [
        f"<p><b>{escape(run['title'])}</b>: {escape(run['algorithm'])} trains {escape(run['model'])} on "
        f"{escape(run['task'])}, {summary.steps} of {run['total_steps']} steps, {escape(run['status'])}<br>"
        f"<code>{escape(str(folder))}</code></p>",
        f"<table>{head}{''.join(table)}</table>" if rows else "",
        *(f"<div>{escape(line)}</div>" for line in _facts(summary)),
        f'<img width="640" src="data:image/png;base64,{picture}">',
    ]
    return "\n".join(filter(None, parts))


def _headline(history: History, curve: Curve) -> str:
    """`eval/accuracy` if its values are shares; otherwise the metric of the trained reward, if its values are the same.
    With opponents they differ, because `eval/accuracy` is the mean over the trained roles only."""
    points = history.evaluated(curve.best)
    if curve.measure(value for _, value in points) != "reward":
        return curve.best
    return next((key for key in curve.evaluations.values() if history.evaluated(key) == points), curve.best)


def _changes(history: History, curve: Curve, without: str) -> tuple[Change, ...]:
    """`without`: a metric to skip, because another has its values."""
    changes = []
    own = [value for _, value in history.evaluated(curve.best)]
    scale = {curve.best, *curve.evaluations.values()} if curve.measure(own) == "reward" else set()  # of no shares
    for key in history.names():
        points = history.evaluated(key)
        if not key.startswith("eval/") or not points or key == without:
            continue
        known = evaluation_format(key) == "number" or any(key == each or key.startswith(f"{each}/") for each in scale)
        share = not known and all(0 <= value <= 1 for _, value in points)
        before = next((value for step, value in points if step == 0), None)
        after = next((value for step, value in reversed(points) if step > 0), None)
        changes.append(Change(key, before, after, share))
    return tuple(changes)


def _stage_seconds(history: History) -> dict[str, float]:
    totals = {key.removeprefix("timing/"): history.total(key) for key in history.names() if is_stage(key)}
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _best(points: Points, curve: Curve) -> tuple[int, float] | None:
    """The first of the best points."""
    return (min if curve.falls else max)(points, key=lambda point: point[1]) if points else None


def _mean(points: Points) -> float | None:
    return sum(value for _, value in points) / len(points) if points else None


def _facts(summary: Summary) -> list[str]:
    """Sentences for both the page and the console."""
    lines = []
    form, name, mean = summary.curve.format, summary.curve.name, "" if summary.curve.falls else "mean "
    if summary.first is not None and summary.last is not None:
        change = summary.last - summary.first
        which = f"{summary.ends} steps" if summary.ends > 1 else "step"
        lines.append(
            f"Training {name}: {format_value(summary.first, form)} in the first {which}, "
            f"{format_value(summary.last, form)} in the last ({change:+.3f})."
        )
    if summary.best_step:
        lines.append(
            f"Best training step: step {summary.best_step[0]}, {mean}{name} {format_value(summary.best_step[1], form)}."
        )
    if summary.best_evaluation:
        updates, value = summary.best_evaluation
        shown = next(change for change in summary.changes if change.key == summary.headline).format(value)
        lines.append(f"Best evaluation: after {updates} updates, {summary.headline} {shown}.")
    if summary.last_evaluation is not None and summary.last_evaluation < summary.steps:
        when = f"after {summary.last_evaluation} of {summary.steps} updates"
        lines.append(f"The last evaluation was made {when if summary.last_evaluation else 'before training'}.")
    if summary.tokens and summary.seconds:
        lines.append(
            f"{summary.tokens:,.0f} tokens generated for training; {format_duration(summary.seconds)} of measured time."
        )
    return lines


def _markdown(summary: Summary, folder: Path, status: str | None) -> str:
    run = summary.run
    blocks = [
        [f"# {plain(run['title'])}"],
        [
            f"**{plain(run['algorithm'])}** trained **{plain(run['model'])}** on **{plain(run['task'])}**: "
            f"{summary.steps} of {plain(run['total_steps'])} steps, {plain(status or run['status'])}, "
            f"started {plain(run['started'])}.",
            _rewards_sentence(run, summary),
        ],
        ["![learning curve](curve.png)"],
        ["## Before and after", "", *change_table(summary)],
        ["## Training", "", *(f"- {line}" for line in _facts(summary))],
        ["## Time per stage", "", *_time_table(summary)],
        ["## Next", "", *_next_commands(run, folder)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _rewards_sentence(run: dict[str, Any], summary: Summary) -> str:
    if run.get("kind") == "sft":
        return "`eval/loss` is the mean of −log π over the held-out demonstrated tokens."
    others = [name for name in run["reward_names"] if name != run["trained_reward"]]
    also = f" Also measured: {', '.join(map(code, others))}." if others else ""
    what = "the reward" if summary.headline == summary.curve.best else "the mean of the trained reward"
    over = ""
    if any(change.key == summary.headline == summary.curve.best and not change.share for change in summary.changes):
        what, over = "the mean of the trained reward", " over the trained roles"
    return f"{code(summary.headline)} is {what} {code(run['trained_reward'])}{over}.{also}"


def change_table(summary: Summary) -> list[str]:
    """A Markdown table of the evaluation metrics before and after training."""
    if not summary.changes:
        return ["The run was not evaluated."]
    lines = ["| metric | before | after | change |", "|---|---:|---:|---:|"]
    for change in summary.changes:
        key, *cells = change.cells()
        lines.append(f"| {code(key)} | {' | '.join(cells)} |")
    return lines


def _time_table(summary: Summary) -> list[str]:
    if not summary.seconds:
        return ["No times were recorded."]
    lines = ["| stage | time | share |", "|---|---:|---:|"]
    for name, seconds in summary.stage_seconds.items():
        lines.append(f"| {plain(name)} | {format_duration(seconds)} | {100 * seconds / summary.seconds:.0f} % |")
    return [*lines, f"| all | {format_duration(summary.seconds)} | 100 % |"]


def _next_commands(run: dict[str, Any], folder: Path) -> Sequence[str]:
    commands = [
        f"covey sample {shlex.quote(str(folder))}   # sample from the trained model",
        f"covey eval {shlex.quote(str(folder))}     # evaluate it again, or on other data",
        f"{run['command']}   # run it again",
    ]
    return [
        block("\n".join(commands), "sh"),
        "",
        "`metrics.jsonl` has every metric of every step, `episodes.jsonl` recorded episodes token by token; "
        "docs/metrics.md explains both.",
    ]
