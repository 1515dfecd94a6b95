"""Check data files for `covey data check`, and describe tasks in numbers for `covey data show`.

A check reports every mistake by line, not only the first one. A mistake would stop a run or cost every attempt at a
task. A remark is only worth knowing: questions that repeat, in one file or in two, of which one may be for training and
the other for testing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.errors import InputError
from covey.images import ImageMistake, images_of, load, picture
from covey.tasks.datasets.dataset import normalize_question
from covey.tasks.demonstrations import demonstration_of
from covey.tasks.files import find_files, task_of
from covey.tasks.reading import Row, RowMistake, Table, names, read_table
from covey.types import Messages, Task


@dataclass
class Report:
    rows: dict[Path, int] = field(default_factory=dict)
    mistakes: list[InputError] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass
class Seen:
    """Where each question and each id occurred first, over all files."""

    questions: dict[str, tuple[Path, int]] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)


def check_files(files: Sequence[str], *, demonstrations: bool = False) -> Report:
    report, seen = Report(), Seen()
    for path in find_files("covey data check", list(files)):
        broken: list[RowMistake] = []
        try:
            table = read_table(path, broken=broken)
        except InputError as error:
            report.mistakes.append(error)
            continue
        report.rows[path] = len(table.rows)
        if demonstrations or _is_demonstration(table):
            for index, row in enumerate(table.rows):
                try:
                    one = demonstration_of(table, row, f"{path.name}:{index}")
                    _check_images(table, row, one.messages)
                except RowMistake as mistake:
                    broken.append(mistake)
        else:
            broken += _check_tasks(table, seen, report)
        broken.sort(key=lambda mistake: mistake.number)
        report.mistakes += broken
    return report


def _check_tasks(table: Table, seen: Seen, report: Report) -> list[RowMistake]:
    mistakes = []
    answered = any("answer" in row.values for row in table.rows)
    repeats: dict[Path, list[str]] = {}
    for index, row in enumerate(table.rows):
        try:
            task = task_of(table, row, f"{table.path}:{index}")
            _check_task(table, row, task, answered, seen.ids)
        except RowMistake as mistake:
            mistakes.append(mistake)
            continue
        here = (table.path, row.number)
        first = seen.questions.setdefault(normalize_question(str(task.messages[-1]["content"])), here)
        if first != here:
            repeats.setdefault(first[0], []).append(f"{row.number} (as {first[1]})")
    report.remarks += [_remark(table, other, places) for other, places in repeats.items()]
    return mistakes


def _is_demonstration(table: Table) -> bool:
    """A conversation that ends with the assistant's message is a demonstration."""
    messages: Any = table.rows[0].values.get("messages") if table.rows else None
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def _check_task(table: Table, row: Row, task: Task, answered: bool, ids: dict[str, str]) -> None:
    if answered and (task.answer is None or (isinstance(task.answer, str) and not task.answer.strip())):
        raise table.mistake(row, "answer is empty", "give the answer, or take the row out")
    _check_images(table, row, task.messages)
    here = table.place(row)
    if (other := ids.setdefault(task.id, here)) != here:
        what = f"data_id {names([task.id])!r} is also in {other}"
        raise table.mistake(row, what, "give every task a data_id of its own")


def _check_images(table: Table, row: Row, messages: Messages) -> None:
    """Decode all images of a row."""
    for image in images_of(messages):
        try:
            picture(load(image))
        except ImageMistake as error:
            raise table.mistake(row, str(error).removeprefix(f"{table.place(row)}: ")) from error


def _remark(table: Table, other: Path, places: list[str]) -> str:
    listed = ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
    where = "asked before" if other == table.path else f"asked in {other} too"
    count = f"{len(places)} questions are" if len(places) > 1 else "1 question is"
    return f"{table.path}: {count} {where}: {table.unit} {listed}"


# -- Statistics --------------------------------------------------------------------------------------------------------

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True)
class Statistics:
    rows: int
    columns: dict[str, str]  # name → kind of its values
    question: tuple[int, ...]  # characters of all messages, at QUANTILES
    answer: tuple[int, ...]  # characters, at QUANTILES; () without answers


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
    """The lengths at QUANTILES; () if there are none."""
    ordered = sorted(lengths)
    last = len(ordered) - 1
    return tuple(ordered[round(q * last)] for q in QUANTILES) if ordered else ()


def _kind(value: Any) -> str:
    names = {bool: "true or false", str: "text", int: "number", float: "number", list: "list", dict: "table"}
    return names.get(type(value), type(value).__name__)
