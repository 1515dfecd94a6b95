"""What a set of tasks looks like in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from covey.types import Task

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True)
class Statistics:
    rows: int
    columns: dict[str, str]  # name → kind of its values
    question: tuple[int, ...]  # characters of all messages, at QUANTILES
    answer: tuple[int, ...]  # characters; () where there are none


def statistics(tasks: Sequence[Task]) -> Statistics:
    columns: dict[str, str] = {}
    for task in tasks:
        for name, value in ({"answer": task.answer} | dict(task.columns)).items():
            if value is not None and columns.get(name, "none") == "none":
                columns[name] = _kind(value)
            columns.setdefault(name, "none")
    if columns.get("answer") == "none":
        del columns["answer"]
    return Statistics(
        rows=len(tasks),
        columns=columns,
        question=quantiles(sum(len(str(m["content"])) for m in task.messages) for task in tasks),
        answer=quantiles(len(str(task.answer)) for task in tasks if task.answer is not None),
    )


def quantiles(lengths: Iterable[int]) -> tuple[int, ...]:
    """The values at these shares of the way from the shortest to the longest; () of nothing."""
    ordered = sorted(lengths)
    last = len(ordered) - 1
    return tuple(ordered[round(q * last)] for q in QUANTILES) if ordered else ()


def _kind(value: Any) -> str:
    names = {bool: "true or false", str: "text", int: "number", float: "number", list: "list", dict: "table"}
    return names.get(type(value), type(value).__name__)
