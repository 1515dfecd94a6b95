"""The picture of a study: accuracy over updates and over time, and DGDO's weights where there are any."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kit.report import COLOURS

from studies import reading
from studies.record import Record
from studies.tables import Results


def draw(results: Results, path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    weighed = {name: group for name, group in results.records.items() if _weight_names(group[0])}
    timed = results.study.timed
    count = 1 + timed + bool(weighed)
    figure, grid = pyplot.subplots(1, count, figsize=(1 + 4.5 * count, 4), layout="constrained", squeeze=False)
    panels = list(grid[0])
    for number, (name, records) in enumerate(results.records.items()):
        colour = COLOURS[number % len(COLOURS)]
        _curves(panels[0], records, results.study.metric, lambda one: one.step, colour, name)
        if timed:
            _curves(panels[1], records, results.study.metric, lambda one: one.seconds, colour, name)
    panels[0].set(title="accuracy over updates", xlabel="updates")
    if timed:
        panels[1].set(title="accuracy over training time", xlabel="seconds, evaluations not counted")
    panels[0].legend(fontsize=8, frameon=False)
    for name, records in weighed.items():
        for number, weight in enumerate(_weight_names(records[0])):
            rows = [record["steps"][weight] for record in records]
            mean = [fmean(values) for values in zip(*rows, strict=False)]
            panels[-1].plot(range(1, len(mean) + 1), mean, color=COLOURS[number], label=weight.split("/")[1])
        panels[-1].set(title=f"weights of {name}, mean of seeds", xlabel="updates", ylim=(0, 1))
        panels[-1].legend(fontsize=8, frameon=False)
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _weight_names(record: Record) -> list[str]:
    return [name for name in record["steps"] if name.startswith("dgdo/") and name.endswith("/weight")]


def _curves(axes: Any, records: Sequence[Record], metric: str, x: Any, colour: str, name: str) -> None:
    """Each seed as a thin line, their mean as a thick one."""
    curves = [reading.evaluations(record, metric) for record in records]
    for curve in curves:
        axes.plot([x(one) for one in curve], [one.mean for one in curve], color=colour, alpha=0.3, linewidth=0.8)
    points = list(zip(*curves, strict=False))
    axes.plot(
        [fmean(x(one) for one in column) for column in points],
        [fmean(one.mean for one in column) for column in points],
        color=colour,
        marker="o",
        markersize=3,
        label=name,
    )
