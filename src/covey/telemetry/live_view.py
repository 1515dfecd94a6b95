"""The live view of a run on a terminal: progress, the learning curve, key metrics, stage times and one sample.

The curve is a braille line: each character cell is a grid of 2 × 4 dots. It is drawn here because rich has no charts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import RLock

from rich.console import Console, ConsoleOptions
from rich.text import Text

from covey.telemetry.base import EpisodeView
from covey.telemetry.history import Points, RunState
from covey.telemetry.key_metrics import first_reported, format_duration, format_value

# The bit of each dot in a braille character, by row and column.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
BARS = "▁▂▃▄▅▆▇█"
MAX_DRAWN = 1e15  # larger values, NaN and infinity are not drawn
Y_AXIS_WIDTH = 7  # columns: a label of five, a space and a tick

CURVE_STYLE = "cyan"
EVALUATION_MARKS = {"greedy": ("●", "green"), "sampled": ("○", "yellow"), "validation": ("●", "green")}
STAGE_STYLES = (("█", "cyan"), ("▓", "magenta"), ("▒", "yellow"), ("░", "green"))
MAX_WARNINGS = 3  # kept on the screen
SPARKLINE_FROM = 84  # columns from which key metrics have room for a sparkline


@dataclass(frozen=True, slots=True)
class Marks:
    glyph: str
    style: str
    points: Points


def plot(line: Points, marks: Sequence[Marks], *, x_end: float, width: int, height: int, style: str) -> list[Text]:
    """`height` lines of at most `width` columns. x runs from 0 to `x_end`, y over the range of the values."""
    columns, rows = max(width - Y_AXIS_WIDTH, 2), max(height - 1, 1)
    line = _drawable(line)
    marks = [Marks(mark.glyph, mark.style, _drawable(mark.points)) for mark in marks]
    low, high = nice_range([y for _, y in line] + [y for mark in marks for _, y in mark.points])

    def place(x: float, y: float, across: int, down: int) -> tuple[int, int]:
        column = min(max(x / max(x_end, 1), 0.0), 1.0) * (across - 1)
        return round(column), round((high - y) / (high - low) * (down - 1))

    cells = [[(" ", "")] * columns for _ in range(rows)]
    dots = [place(x, y, 2 * columns, 4 * rows) for x, y in line]
    for row, column, char in _braille(dots):
        cells[row][column] = (char, style)
    for mark in marks:
        for x, y in mark.points:
            column, row = place(x, y, columns, rows)
            cells[row][column] = (mark.glyph, mark.style)
    right = f"{x_end:g}"
    gap = columns - len(right) - 1
    middle = "updates".center(gap) if gap > len("updates") else " " * gap
    x_axis = Text(" " * Y_AXIS_WIDTH + "0" + middle + right, style="dim", no_wrap=True)
    return [*_with_y_axis(cells, low, high), x_axis]


def sparkline(values: Iterable[float], width: int) -> str:
    """The last values as a row of bars, scaled to their range."""
    values = [value for value in values if abs(value) < MAX_DRAWN][-width:]
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:
        return BARS[3] * len(values)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in values)


def nice_range(values: Sequence[float]) -> tuple[float, float]:
    """The range of the values, widened to round numbers."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    size = max(abs(low), abs(high), 1e-6)
    span = high - low if high - low > 1e-6 * size else size  # a narrower range would give equal labels
    unit = 10.0 ** math.floor(math.log10(span))
    step = next(unit * part for part in (0.2, 0.25, 0.5, 1.0, 2.0, 5.0) if span / (unit * part) <= 5)
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    return (low, high) if high > low else (low, low + step)


def _drawable(points: Points) -> Points:
    return [(x, y) for x, y in points if abs(y) < MAX_DRAWN]


def _braille(dots: Sequence[tuple[int, int]]) -> list[tuple[int, int, str]]:
    """Row, column and character of every cell that the connected dots touch."""
    bits: dict[tuple[int, int], int] = {}
    heights: dict[int, list[int]] = {}
    for column, row in dots:
        heights.setdefault(column, []).append(row)
    # Points that share a column of dots are drawn as their mean.
    path = [(column, sum(rows) / len(rows)) for column, rows in sorted(heights.items())]
    for (start, from_row), (end, to_row) in zip(path, path[1:] or path, strict=False):
        pieces = max(end - start, round(abs(to_row - from_row)), 1)
        for piece in range(pieces + 1):
            x = round(start + (end - start) * piece / pieces)
            y = round(from_row + (to_row - from_row) * piece / pieces)
            cell = (y // 4, x // 2)
            bits[cell] = bits.get(cell, 0) | DOTS[y % 4][x % 2]
    return [(row, column, chr(0x2800 + mask)) for (row, column), mask in bits.items()]


def _with_y_axis(cells: list[list[tuple[str, str]]], low: float, high: float) -> list[Text]:
    last = len(cells) - 1
    middle = last // 2
    labels = {0: f"{high:.3g}", last: f"{low:.3g}"}
    if last >= 4:
        labels[middle] = f"{high - (high - low) * middle / last:.2g}"
    lines = []
    for row, line in enumerate(cells):
        label = labels.get(row, "")[:5]
        text = Text(no_wrap=True).append(f"{label:>5} {'┤' if label else '│'}", style="dim")
        for char, style in line:
            text.append(char, style=style)
        lines.append(text)
    return lines


class LiveView:
    """Draws a `RunState`, from rich's thread: hold `lock` while changing the state.

    Every section is a list of lines, so that the view can be cut to the height of the terminal.
    """

    def __init__(self, state: RunState, now: Callable[[], float]) -> None:
        self.lock = RLock()
        self.state = state
        self.stage: str | None = None
        self.progress: tuple[int, int, str] | None = None
        self.status = "running"
        self._now = now
        self._since = now()

    def enter(self, stage: str | None) -> None:
        self.stage, self.progress, self._since = stage, None, self._now()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        with self.lock:
            for line in self.lines(console, options.max_width, console.size.height - 1):
                line.truncate(options.max_width, overflow="ellipsis")
                yield line

    def lines(self, console: Console, width: int, height: int) -> list[Text]:
        rows = self._plan(height)
        sections = (
            self._header(width),
            self._curve(width, rows["curve"]),
            self._metrics(width, rows["metrics"]),
            self._time(width, rows["time"]),
            self._warnings(width, rows["warnings"]),
            self._sample(console, width, rows["sample"]),
        )
        return [line for section in sections for line in section]

    def _plan(self, height: int) -> dict[str, int]:
        """Rows per section, with its title. On a small terminal the least important shrink first, then are dropped."""
        metrics = 1 + len(self._metric_rows())
        warnings = min(len(self.state.warnings), MAX_WARNINGS)
        rows = {
            "header": 4,
            "curve": 10,
            "metrics": metrics,
            "time": 3 if self.state.timings else 0,
            "warnings": warnings + 1 if warnings else 0,
            "sample": 8 if self.state.sample else 0,
        }
        for name, least in (("sample", 5), ("curve", 7), ("metrics", 6), ("sample", 0), ("time", 0), ("curve", 0)):
            missing = sum(rows.values()) - height
            if missing > 0:
                rows[name] = min(rows[name], max(least, rows[name] - missing) if least else 0)
        for name, most in (("metrics", metrics), ("curve", 13), ("sample", 14 if rows["sample"] else 0)):
            spare = height - sum(rows.values())
            if spare > 0 and rows[name]:
                rows[name] = min(most, rows[name] + spare)
        return rows

    def _header(self, width: int) -> list[Text]:
        state, info = self.state, self.state.info
        share = min(state.done / max(info.total_steps, 1), 1.0)
        eta = state.eta() if self.status == "running" else None
        left = f"  {format_duration(eta)} left" if eta is not None else ""
        count = f"step {state.done}/{info.total_steps}  "
        tail = f"  {100 * share:3.0f}%{left}"
        bar = max(width - len(count) - len(tail), 4)
        full = round(share * bar)
        progress = Text(count, no_wrap=True)
        progress.append("━" * full, style=CURVE_STYLE).append("─" * (bar - full), style="dim").append(tail)
        return [
            Text.assemble((info.title, "bold"), (f"  {info.folder}", "dim")),
            Text.assemble(
                *((info.algorithm, "bold"), " trains ", (info.model, "bold"), " on ", (info.task, "bold")),
                info.scored_by,
            ),
            progress,
            self._running(width),
        ]

    def _running(self, width: int) -> Text:
        if self.status != "running":
            return Text(self.status, style="bold green" if self.status == "finished" else "bold red")
        text = Text.assemble(("now  ", "dim"), (self.stage or "between stages", "bold"))
        if self.progress:
            done, total, what = self.progress
            text.append(f"  {done}/{total} {what}")
        if self.stage:
            text.append(f"  {format_duration(self._now() - self._since)}", style="dim")
        if speed := self.state.metrics.get("perf/tokens_per_second"):
            text.append(f"  {speed:,.0f} tokens/s".rjust(width - len(text)))
        return text

    def _curve(self, width: int, rows: int) -> list[Text]:
        if not rows:
            return []
        title = Text(f" {self.state.curve.name}  ", style="bold").append("⠤⠒ training", style=f"not bold {CURVE_STYLE}")
        marks: list[Marks] = []
        for mode, points in self.state.evaluations.items():
            glyph, style = EVALUATION_MARKS[mode]
            if points:
                marks.insert(0, Marks(glyph, style, points))  # the first is drawn last, on top
                title.append(f"  {glyph} eval {mode}", style=f"not bold {style}")
        end = self.state.info.total_steps
        drawn = plot(self.state.training, marks, x_end=end, width=width, height=rows - 1, style=CURVE_STYLE)
        return [_rule(title, width), *drawn]

    def _metric_rows(self) -> list[tuple[str, str, str, str]]:
        """Label, value, sparkline, meaning. After the first step, metrics that the run does not report are hidden."""
        state, rows = self.state, []
        for alternatives in state.key_metrics:
            metric = first_reported(alternatives, state.metrics)
            if metric.key in state.metrics or not state.metrics:
                value = format_value(state.metrics.get(metric.key), metric.format)
                rows.append((metric.label, value, sparkline(state.series[metric.key], 12), metric.meaning))
        return rows

    def _metrics(self, width: int, rows: int) -> list[Text]:
        lines = [_rule(Text(" key metrics", style="bold"), width)]
        for label, value, recent, meaning in self._metric_rows()[: max(rows - 1, 0)]:
            text = Text(f"{label:<12}").append(f"{value:>7}  ", style="bold")
            if width >= SPARKLINE_FROM:
                text.append(f"{recent:<14}", style=CURVE_STYLE)
            lines.append(text.append(meaning, style="dim"))
        return lines

    def _time(self, width: int, rows: int) -> list[Text]:
        stages = self.state.stage_seconds()
        total = sum(stages.values())
        if not rows or not total:
            return []
        title = Text(" time per step  ", style="bold").append(format_duration(total), style="not bold")
        if "timing/evaluate" in self.state.metrics:
            title.append(
                f"  (an evaluation {format_duration(self.state.metrics['timing/evaluate'])})", style="not bold dim"
            )
        bar, legend, before = Text(), Text(), 0.0
        for (name, seconds), (glyph, style) in zip(_merge_shortest(stages), STAGE_STYLES, strict=False):
            end = before + seconds
            bar.append(glyph * (round(end / total * width) - round(before / total * width)), style=style)
            legend.append(f"{glyph} ", style=style).append(f"{name} {format_duration(seconds)} ")
            legend.append(f"{100 * seconds / total:.0f}%   ", style="dim")
            before = end
        legend.rstrip()
        return [_rule(title, width), bar, legend]

    def _warnings(self, width: int, rows: int) -> list[Text]:
        if not rows:
            return []
        count = len(self.state.warnings)
        title = Text(f" warnings ({count})" if count > MAX_WARNINGS else " warnings", style="bold yellow")
        newest = self.state.warnings[-MAX_WARNINGS:]
        return [_rule(title, width), *(Text(f"! {_one_line(text)}", style="yellow") for text in newest)]

    def _sample(self, console: Console, width: int, rows: int) -> list[Text]:
        sample = self.state.sample
        if sample is None or not rows:
            return []
        title = Text(f" one answer of {self.state.sample_from}  ", style="bold")
        title.append(f"reward {format_value(sample.reward, 'score')}", style="not bold green")
        if sample.advantage is not None:
            title.append(f"  advantage {sample.advantage:+.3f}", style="not bold magenta")
        lines = [_rule(title, width), *_dialogue(console, sample, width, rows - 1)]
        # Padded to a constant height, so that output below the view does not move.
        return lines + [Text()] * (rows - len(lines)) if self.status == "running" else lines


def _merge_shortest(stages: dict[str, float]) -> list[tuple[str, float]]:
    """One entry per style; the shortest stages are merged."""
    items, most = list(stages.items()), len(STAGE_STYLES)
    if len(items) <= most:
        return items
    return [*items[: most - 1], ("other", sum(seconds for _, seconds in items[most - 1 :]))]


def _dialogue(console: Console, sample: EpisodeView, width: int, rows: int) -> list[Text]:
    """Question, reply and expected answer in at most `rows` lines. A long question is cut before the reply."""
    expected = [] if sample.answer is None else [("expected", sample.answer, "dim", 1)]
    room = rows - len(expected)
    question = max(1, min(room // 2, 4))
    parts = [("question", sample.question, "", question), ("reply", sample.reply, "bold", room - question), *expected]
    lines = []
    for label, text, style, most in parts:
        wrapped = Text(_one_line(text), style=style).wrap(console, max(width - 10, 10))
        if len(wrapped) > most > 0:
            wrapped[most - 1].rstrip()
            wrapped[most - 1].append(" …")
        for index, line in enumerate(wrapped[:most]):
            head = f"{label if index == 0 else '':<10}"
            lines.append(Text.assemble((head, "dim"), line))
    return lines


def _rule(title: Text, width: int) -> Text:
    """`── title ─────`"""
    rest = " " + "─" * max(width - title.cell_len - 3, 0)
    return Text.assemble(("──", "dim"), title, (rest, "dim"))


def _one_line(text: str) -> str:
    """Line breaks made visible, control characters replaced: a model may print anything."""
    shown = text.strip().replace("\n", " ⏎ ").replace("\t", " ")
    return "".join(char if char.isprintable() else "·" for char in shown)
