"""What a simulation found: a table of splits, where its figures come from, and the same as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from covey.simulate.figures import Figure
from covey.simulate.hardware import GIB
from covey.simulate.memory import Memory
from covey.simulate.splits import Prediction, best

CAVEAT = (
    "A prediction from figures of one device. It was checked against small runs on one machine (docs/simulate.md);\n"
    "no accuracy is claimed beyond that scale. Splits can be compared with each other sooner than with a clock."
)
HEADER = (
    "",
    "learner + rollout",
    "mode",
    "s/step",
    "tokens/s",
    "learner busy",
    "engines busy",
    "age mean",
    "age max",
    "learner GiB",
    "engine GiB",
)


def report_text(title: str, figures: Sequence[Figure], predictions: list[Prediction]) -> str:
    chosen = best(predictions)
    rows = [_cells(p, chosen is p) for p in predictions]
    lines = [title, "", *_aligned([HEADER, *rows]), ""]
    if chosen is None:
        lines += ["Nothing fits: more devices, gradient checkpointing, or rollout.tensor_parallel", ""]
    else:
        lines += [f"* the shortest step: {chosen.split.name}, {chosen.mode}", *_parts(chosen), ""]
    lines += ["Figures", *_figures(figures), "", CAVEAT]
    return "\n".join(lines)


def report_json(
    title: str, figures: Sequence[Figure], predictions: list[Prediction], settings: dict[str, Any]
) -> dict[str, Any]:
    chosen = best(predictions)
    return {
        "title": title,
        "settings": settings,
        "figures": [asdict(figure) for figure in figures],
        "splits": [_plain(p) | {"best": chosen is p} for p in predictions],
        "caveat": CAVEAT,
    }


def _plain(prediction: Prediction) -> dict[str, Any]:
    found = asdict(prediction) | {"mode": prediction.mode}
    return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in found.items()}


def _cells(p: Prediction, chosen: bool) -> tuple[str, ...]:
    head = ("*" if chosen else "", p.split.name, p.mode)
    memory = (f"{p.learner.total / GIB:.1f}", f"{p.engine.total / GIB:.1f}")
    if not p.fits:
        return (*head, "does not fit", "", "", "", "", "", *memory)
    return (
        *head,
        f"{p.step:.3g}",
        f"{p.tokens_per_second:,.0f}",
        f"{100 * p.learner_busy:.0f} %",
        f"{100 * p.engines_busy:.0f} %",
        f"{p.age:.2f}",
        str(p.age_max),
        *memory,
    )


def _parts(p: Prediction) -> list[str]:
    """Of the best split: what its step and its memory are made of."""
    lines = [
        f"  learning {p.learning:.3g} s, of which messages between {p.split.learners} devices ({p.parallel}) "
        f"{p.messages:.3g} s (assumed); publishing {p.publishing:.3g} s",
        f"  learner's device, GiB (assumed): {_memory(p.learner)}",
    ]
    return lines if p.split.shared else [*lines, f"  engine's device, GiB (assumed): {_memory(p.engine)}"]


def _memory(memory: Memory) -> str:
    return ", ".join(f"{name} {value / GIB:.2f}" for name, value in asdict(memory).items() if value)


def _figures(figures: Sequence[Figure]) -> list[str]:
    rows = [("  " + figure.name, figure.text, f"({figure.label})", figure.source) for figure in figures]
    return [line.rstrip() for line in _aligned(rows, right=False)]


def _aligned(rows: Sequence[Sequence[str]], *, right: bool = True) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]

    def cell(text: str, at: int) -> str:
        return text.rjust(widths[at]) if right and at > 2 else text.ljust(widths[at])

    return ["  ".join(cell(text, at) for at, text in enumerate(row)).rstrip() for row in rows]
