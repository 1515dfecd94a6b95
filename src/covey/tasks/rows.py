"""Tasks from rows that are in memory: a list of dicts or Tasks, a Hugging Face `Dataset`, a pandas table, or anything
else that yields dicts. The columns are those of data files (`files.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from covey.errors import InputError
from covey.tasks.files import task_of
from covey.tasks.reading import Row, Table
from covey.types import Task

MOST_ROWS = 10_000_000  # of a stream, which might not end


def list_rows(data: Any, name: str) -> list[Any]:
    """The rows of `data`, which the user gave as `name`."""
    if isinstance(data, (str, bytes)):
        raise InputError(f"{name}={data!r} is a text\n  give rows: a list of dicts, or load_dataset({data!r})")
    if isinstance(data, Mapping):
        raise InputError(
            f"{name} holds several data sets ({', '.join(map(str, data))})\n  give one of them: {name}=DATA[NAME]"
        )
    if hasattr(data, "iterrows"):  # a pandas table yields its columns
        data = data.to_dict("records")
    if not isinstance(data, Iterable):
        raise InputError(f"{name} must be a Dataset or a list of dicts, got {type(data).__name__}")
    rows = list(islice(data, MOST_ROWS + 1))
    if not rows:
        raise InputError(f"{name} has no rows")
    if len(rows) > MOST_ROWS:
        raise InputError(f"{name} does not end after {MOST_ROWS} rows\n  fix: {name}=DATA.take(N)")
    return rows


def tasks_of_rows(data: Any, name: str) -> tuple[Task, ...]:
    rows = list_rows(data, name)
    table = Table(Path(name), "row", [Row(n, _columns(row, n, name)) for n, row in enumerate(rows, start=1)])
    tasks = [
        row if isinstance(row, Task) else task_of(table, table.rows[index], default_id=str(index))
        for index, row in enumerate(rows)
    ]
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:  # the id names a task's random streams
            raise InputError(f"two of {name} have the id {task.id!r}\n  give each its own data_id, or none at all")
        seen.add(task.id)
    return tuple(tasks)


def _columns(row: Any, number: int, name: str) -> dict[str, Any]:
    if isinstance(row, Task):
        return {}
    if not isinstance(row, Mapping):
        raise InputError(f"{name}, row {number}: must be a dict or a covey.Task, got {type(row).__name__}")
    return {str(key): list(value) if isinstance(value, tuple) else value for key, value in row.items()}
