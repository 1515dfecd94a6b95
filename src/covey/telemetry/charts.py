"""Learning curves as PNG: the training reward of each step and the evaluations.

The x axis counts updates: the answers of step i (from 0) were sampled after i updates, an evaluation at s after s.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.errors import InputError
from covey.storage import write_atomically
from covey.telemetry.history import Points, read_history, read_run
from covey.telemetry.key_metrics import Curve, curve_of

# 1600 × 900 pixels; fonts are sized for a page that shows it 800 wide.
WIDTH, HEIGHT, DPI = 8.0, 4.5, 200
BLUE, GREEN, ORANGE, GREY = "#2f6db5", "#1b8a5a", "#d9822b", "#6b7280"
RUN_COLOURS = ("#2f6db5", "#d9822b", "#1b8a5a", "#a4478c", "#b33c3c", "#5b5b5b")
MODE_STYLES = {"greedy": (GREEN, "o"), "sampled": (ORANGE, "s"), "validation": (GREEN, "o")}
# By suffix: the trained reward, and its lenient variant.
EVALUATION_STYLES: dict[str, dict[str, Any]] = {
    "": {"linestyle": "-", "linewidth": 1.6, "markersize": 5},
    "/lenient": {"linestyle": "--", "linewidth": 1.2, "markersize": 3.5, "alpha": 0.7},
}


def draw_curve(folder: Path, out: Path) -> Path:
    """Write the curve of one run to a file."""
    return _write(curve_figure(folder), out)


def curve_figure(folder: Path) -> Any:
    """The curve of one run as a matplotlib Figure, which notebooks display."""
    run, history = read_run(folder), read_history(folder)
    figure, axes = _canvas()
    curve = curve_of(run.get("kind", "rl"), run["trained_reward"])
    steps = history.training(curve.key)
    _plot_steps(axes, steps, BLUE, f"training {curve.name}")
    for mode, key in curve.evaluations.items():
        colour, marker = MODE_STYLES[mode]
        for suffix, style in EVALUATION_STYLES.items():
            if points := history.evaluated(f"{key}{suffix}"):
                name = f"evaluation, {mode}{suffix.replace('/', ', ')}"
                axes.plot(*_xy(points), color=colour, marker=marker, label=name, **style)
    _titles(axes, run["title"], f"{run['algorithm']} trains {run['model']} on {run['task']}")
    if not steps and not history.evaluations:
        axes.text(0.5, 0.5, "nothing was recorded", ha="center", transform=axes.transAxes, fontsize=12, color=GREY)
    _finish(curve, axes)
    return figure


def compare_curves(folders: Sequence[Path], labels: Sequence[str], out: Path) -> Path:
    """Write training reward and evaluations of several runs, side by side, in one colour per run."""
    if len(folders) != len(labels):
        raise InputError(f"{len(folders)} folders, but {len(labels)} labels")
    figure, (left, right) = _canvas(columns=2)
    runs = [read_run(folder) for folder in folders]
    for index, (folder, run, label) in enumerate(zip(folders, runs, labels, strict=True)):
        history = read_history(folder)
        colour, label = RUN_COLOURS[index % len(RUN_COLOURS)], shortened(label, 30)
        _plot_steps(left, history.training("reward/mean"), colour, label)
        for mode, line in (("greedy", "-"), ("sampled", ":")):
            if points := history.evaluated(f"eval/{mode}/{run['trained_reward']}"):
                name = f"{label}, {mode}"
                right.plot(*_xy(points), line, color=colour, marker="o", markersize=4, linewidth=1.6, label=name)
    left.set_title("training reward", loc="left", fontsize=12, fontweight="bold")
    right.set_title("evaluation on unseen tasks", loc="left", fontsize=12, fontweight="bold")
    subjects = {f"{run['model']} on {run['task']}" for run in runs}
    if len(subjects) == 1:
        figure.suptitle(shortened(subjects.pop(), 100), x=0.01, ha="left", fontsize=10, color=GREY)
    _finish(curve_of("rl", ""), left, right)
    right.set_ylabel("")
    return _write(figure, out)


def moving_average(points: Points, window: int) -> list[tuple[float, float]]:
    """Centred mean over `window` points; fewer near the ends, so that the line spans the whole run."""
    values, reach = [y for _, y in points], (window - 1) // 2
    windows = [values[max(index - reach, 0) : index + reach + 1] for index in range(len(values))]
    return [(x, sum(around) / len(around)) for (x, _), around in zip(points, windows, strict=True)]


def smoothing(steps: int) -> int:
    """An odd window of about a tenth of the run; 1 (none) below 10 steps."""
    return 1 if steps < 10 else min(51, 2 * (steps // 20) + 3)


def shortened(text: str, most: int) -> str:
    """Long text cut in the middle, because the ends of paths differ."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def _plot_steps(axes: Any, steps: Points, colour: str, label: str) -> None:
    """Draw every step lightly with the moving average on top; a short run without averaging."""
    window = smoothing(len(steps))
    if window == 1:
        axes.plot(*_xy(steps), color=colour, linewidth=2.0, marker=".", label=label)
        return
    axes.plot(*_xy(steps), color=colour, alpha=0.25, linewidth=1.0)
    averaged = moving_average(steps, window)
    axes.plot(*_xy(averaged), color=colour, linewidth=2.0, label=f"{label} (mean of {window} steps)")


def _canvas(columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        """Notebooks display a figure through this method, even if pyplot was never imported."""

        def _repr_png_(self) -> bytes:
            return render(self, "png", dpi=DPI // 2)

    figure = NotebookFigure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, sharey=columns > 1)


def _titles(axes: Any, title: str, subtitle: str) -> None:
    axes.set_title(shortened(title, 66), loc="left", fontsize=13, fontweight="bold", pad=24)
    below = axes.annotate(
        *(shortened(subtitle, 94), (0, 1), (0, 8)),
        **{"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": 10, "color": GREY},
    )
    below.set_in_layout(False)  # it is in the title's padding; a long subtitle must not shrink the axes


def _xy(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _finish(curve: Curve, *panels: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    low = min(axes.dataLim.y0 for axes in panels)
    high = max(axes.dataLim.y1 for axes in panels)
    for axes in panels:
        if low >= 0 and (high <= 1 or curve.falls):  # scores and losses are drawn from 0
            axes.set_ylim(0, max(1.06 * high, 0.1))
        axes.set_xlabel("updates", fontsize=10)
        axes.set_ylabel(curve.name, fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
        axes.tick_params(labelsize=9)
        axes.grid(color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8.5, frameon=True, framealpha=0.9, edgecolor="none")


def _write(figure: Any, out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, render(figure, out.suffix.removeprefix(".") or "png"))
    return out


def render(figure: Any, form: str, dpi: int = DPI) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format=form, dpi=dpi)
    return picture.getvalue()
