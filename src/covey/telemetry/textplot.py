"""A curve in text: a braille line with marks on it. Each character cell is a grid of 2 × 4 dots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.text import Text

from covey.telemetry.history import Points

# The bit of each dot in a braille character, by row and column.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
BARS = "▁▂▃▄▅▆▇█"
HUGE = 1e15  # beyond it a value is not drawn, nor are NaN and infinity: a diverging run must still be watchable
AXIS = 7  # columns of the y axis: a label of five, a space and a tick


@dataclass(frozen=True, slots=True)
class Marks:
    glyph: str
    style: str
    points: Points


def plot(line: Points, marks: Sequence[Marks], *, x_end: float, width: int, height: int, style: str) -> list[Text]:
    """`height` lines of at most `width` columns; x runs from 0 to `x_end`, y over what there is to show."""
    columns, rows = max(width - AXIS, 2), max(height - 1, 1)
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
    return [*_with_y_axis(cells, low, high), _x_axis(x_end, columns)]


def sparkline(values: Iterable[float], width: int) -> str:
    """The last values as a row of bars, scaled to their own range."""
    values = [value for value in values if abs(value) < HUGE][-width:]
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:
        return BARS[3] * len(values)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in values)


def nice_range(values: Sequence[float]) -> tuple[float, float]:
    """The values' range, widened to round numbers."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    size = max(abs(low), abs(high), 1e-6)
    span = high - low if high - low > 1e-6 * size else size  # flatter than a label can say: flat
    unit = 10.0 ** math.floor(math.log10(span))
    step = next(unit * part for part in (0.2, 0.25, 0.5, 1.0, 2.0, 5.0) if span / (unit * part) <= 5)
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    return (low, high) if high > low else (low, low + step)


def _drawable(points: Points) -> Points:
    return [(x, y) for x, y in points if abs(y) < HUGE]


def _braille(dots: Sequence[tuple[int, int]]) -> list[tuple[int, int, str]]:
    """Row, column and character of every cell that the connected dots touch."""
    bits: dict[tuple[int, int], int] = {}
    heights: dict[int, list[int]] = {}
    for column, row in dots:
        heights.setdefault(column, []).append(row)
    # Where several points share a column of dots, their mean stands for them.
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


def _x_axis(x_end: float, columns: int) -> Text:
    right = f"{x_end:g}"
    middle = "updates"
    gap = columns - len(right) - 1
    inner = middle.center(gap) if gap > len(middle) else " " * gap
    return Text(" " * AXIS + "0" + inner + right, style="dim", no_wrap=True)
