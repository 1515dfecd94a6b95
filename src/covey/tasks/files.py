"""Tasks from data files, or from rows in memory.

Columns:

    question | messages | prompt    the question: a string, or a list of {role, content} (verl calls it `prompt`)
    instruction                     the question of a task with a web page (`url` or `html`: docs/gui.md)
    answer                          what rewards compare with; else verl's `reward_model.ground_truth`
    data_id                         the task's id; default `FILE:ROW` (from 0)
    image | images                  pictures, at the markers <image> of the question, or before it (covey/images.py)
    any other column                passed to the rewards in `Task.columns`

Rows in memory are a list of dicts or Tasks, a Hugging Face `Dataset`, a pandas table, or any iterable of dicts, with
the same columns.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from covey.config.schema import DataConfig
from covey.errors import Absent, InputError, nearest
from covey.images import MARKER, SUFFIXES, ImageMistake, has_images, has_marker, place_images, with_images
from covey.tasks.reading import Row, Table, kind, names, read_table
from covey.types import Demonstration, Task

QUESTION_COLUMNS = ("question", "messages", "prompt")  # in order of precedence
OTHER_NAMES = ("problem", "query", "instruction", "input", "text")
ROLES = ("system", "user", "assistant", "tool")
IMAGE_COLUMNS = ("images", "image")
MAX_ROWS = 10_000_000  # of an iterable, which might be infinite
MESSAGE_FIX = 'a message looks like {"role": "user", "content": "What is 1+1?"}'


Item = TypeVar("Item", bound=Task | Demonstration)


def read_splits(
    data: DataConfig, read: Callable[[str, Any], list[Item]], noun: str, warnings: list[str]
) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """What `read` returns for data.train_files and data.val_files, up to data.train_size and data.val_size."""
    if data.options:
        warnings.append("data.options is not used: it belongs to generated tasks, and data files are given")
    splits: list[tuple[Item, ...]] = []
    missing: list[Absent] = []
    for split, files, size in (("train", data.train_files, data.train_size), ("val", data.val_files, data.val_size)):
        try:
            items = read(f"data.{split}_files", files) if files is not None else []
        except Absent as error:
            missing.append(error)
            continue
        if size is not None and items and size > len(items):
            warnings.append(f"data.{split}_size={size}, but there are only {len(items)} {noun}")
        if split == "val" and size is not None and files is None:
            warnings.append(f"data.val_size={size} has no effect without data.val_files: no {noun} are held out")
        splits.append(tuple(items[:size]))
    if missing:
        raise Absent("\n".join(map(str, missing)))
    return splits[0], splits[1]


def prepend_system(items: Sequence[Item], prompt: str) -> tuple[Item, ...]:
    """Put the system prompt before the messages of every item that has no system message of its own."""
    system = {"role": "system", "content": prompt}
    return tuple(
        one if one.messages[0]["role"] == "system" else replace(one, messages=(system, *one.messages)) for one in items
    )


# -- Files -------------------------------------------------------------------------------------------------------------


def read_tasks(setting: str, files: Any) -> list[Task]:
    """The tasks of all files that the setting (`data.train_files`) names, in order."""
    tasks: list[Task] = []
    seen: dict[str, tuple[Table, Row]] = {}
    for table, row, default_id in rows_of(setting, files):
        task = task_of(table, row, default_id)
        if task.id in seen:
            raise _duplicate_id(task.id, *seen[task.id], table, row)
        seen[task.id] = (table, row)
        tasks.append(task)
    return tasks


def rows_of(setting: str, files: Any) -> Iterator[tuple[Table, Row, str]]:
    """Each row of all files with its table and default id."""
    paths = find_files(setting, files)
    names = Counter(path.name for path in paths)
    for path in paths:
        table = read_table(path)
        label = path.name if names[path.name] == 1 else str(path)
        for index, row in enumerate(table.rows):
            yield table, row, f"{label}:{index}"


def find_files(setting: str, files: Any) -> list[Path]:
    """One path or glob, or a list of them. Files of one glob come in sorted order."""
    patterns = [files] if isinstance(files, str | Path) else files
    if not files or not isinstance(patterns, Sequence):
        raise InputError(f"{setting} must be a file or a list of files, got {files!r}")
    paths: list[Path] = []
    for pattern in patterns:
        for path in _matches(setting, str(pattern)):
            if path in paths:
                raise InputError(f"{setting} names {path} twice\n  fix: name every file once")
            paths.append(path)
    return paths


def _matches(setting: str, pattern: str) -> list[Path]:
    try:
        return _existing(setting, pattern, Path(pattern).expanduser())
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, ~unknown_user, a null byte
        reason = (error.strerror or "") if isinstance(error, OSError) else str(error)
        raise InputError(f"{setting}: {pattern[:200]!r} is not the name of a file ({reason})") from None


def _existing(setting: str, pattern: str, path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.exists():
        raise _not_a_file(setting, path)
    if any(wildcard in pattern for wildcard in "*?["):
        matches = [Path(name) for name in sorted(glob(str(path), recursive=True))]
        if files := [match for match in matches if match.is_file()]:
            return files
        if matches:
            raise _not_a_file(setting, matches[0])
        raise Absent(f"{setting}: no file matches {pattern}")
    raise _not_found(setting, path)


def _not_a_file(setting: str, path: Path) -> InputError:
    """Pipes and devices may block or never end. Files are also read more than once, to detect changes on resuming."""
    if path.is_dir():
        return InputError(f"{setting}: {path} is a folder\n  fix: name the files in it, for example {path}/*.jsonl")
    kinds = {"a named pipe": path.is_fifo, "a socket": path.is_socket, "a device": path.is_char_device}
    kind = next((kind for kind, is_one in kinds.items() if is_one()), "a device")
    return InputError(f"{setting}: {path} is {kind}, not a file\n  fix: write the data to a file first, and name that")


def _not_found(setting: str, path: Path) -> Absent:
    if path.is_symlink():
        return Absent(f"{setting}: {path} is a link to {path.readlink()}, which does not exist")
    lines = [f"{setting}: no such file {path}"]
    if not path.parent.is_dir():
        lines.append(f"  there is no folder {path.parent} either")
    elif guess := nearest(path.name, [entry.name for entry in path.parent.iterdir()]):
        lines.append(f"  did you mean   {path.parent / guess}?")
    return Absent("\n".join(lines))


def _duplicate_id(data_id: str, first_table: Table, first: Row, table: Table, row: Row) -> InputError:
    fix = "\n  fix: give every task a data_id of its own, or leave the column out"
    if table is first_table:
        where = f"on {table.unit}s {first.number} and {row.number}"
        return InputError(f"{table.path}: data_id {names([data_id])!r} {where}{fix}")
    where = f"{first_table.path}, {first_table.unit} {first.number}, and in {table.path}, {table.unit} {row.number}"
    return InputError(f"data_id {names([data_id])!r} in {where}{fix}")


# -- Rows --------------------------------------------------------------------------------------------------------------


def task_of(table: Table, row: Row, default_id: str) -> Task:
    columns = dict(row.values)
    names_here = [name for name in QUESTION_COLUMNS if name in columns]  # Parquet fills columns with nulls
    name = next((name for name in names_here if columns[name] is not None), names_here[0] if names_here else None)
    if name is None and "instruction" in columns and {"url", "html"} & {*columns}:
        name = "instruction"
    if name is None:
        fixes = ["name the column with the question `question`, or give `messages`, a list of {role, content}"]
        if guess := _question_by_another_name(row.values):
            fixes = [f"rename column {guess} to question"]
        raise table.mistake(row, f"no column question (columns here: {names(row.values)})", *fixes)
    messages = read_images(table, row, _messages(table, row, name, columns.pop(name)), columns)
    answer = columns.pop("answer", None)
    if answer is None and isinstance(reward_model := columns.get("reward_model"), Mapping):
        answer = reward_model.get("ground_truth")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise table.mistake(row, f"answer is {answer}, which is not a number", "give the answer, or take the row out")
    data_id = columns.pop("data_id", None)
    if data_id is not None and (isinstance(data_id, bool) or not isinstance(data_id, str | int)):
        raise table.mistake(row, f"data_id must be a string or a whole number, got {kind(data_id)}")
    return Task(default_id if data_id is None else str(data_id), messages, answer, columns, table.place(row))


def _question_by_another_name(columns: Collection[str]) -> str | None:
    """A typo or a common other name. Typos must be close: `solution` resembles `question`, but is the answer."""
    close = difflib.get_close_matches("question", columns, n=1, cutoff=0.8)
    return next((name for name in (*close, *OTHER_NAMES) if name in columns), None)


def _messages(table: Table, row: Row, column: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, str) and column != "messages":
        if not value.strip():
            raise table.mistake(row, f"{column} is empty")
        return ({"role": "user", "content": value},)
    if column == "question":
        raise table.mistake(
            row, f"question must be a string, got {kind(value)}", "a list of messages is called `messages`"
        )
    messages = read_messages(table, row, column, value)
    if messages[-1]["role"] not in ("user", "tool"):
        last = messages[-1]["role"]
        fix = "leave out the reply: the model is to write it" if last == "assistant" else "add the user's message"
        raise table.mistake(row, f"{column} must end with the user's message, but ends with role {last}", fix)
    return messages


def read_messages(table: Table, row: Row, column: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else kind(value)
        raise table.mistake(row, f"{column} must be a list of messages, got {got}", MESSAGE_FIX)
    return tuple(_message(table, row, f"{column}[{index}]", message) for index, message in enumerate(value))


def _message(table: Table, row: Row, where: str, message: Any) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        raise table.mistake(row, f"{where} must be an object, got {kind(message)}", MESSAGE_FIX)
    # Parquet fills missing fields with nulls.
    message = {key: value for key, value in message.items() if value is not None}
    if "role" not in message:
        raise table.mistake(row, f"{where} has no role", MESSAGE_FIX)
    role = message["role"]
    if role not in ROLES:
        guess = nearest(str(role), ROLES)
        hint = f" (did you mean {guess}?)" if guess else ""
        raise table.mistake(row, f"{where} has unknown role {role!r}{hint}", f"roles are {', '.join(ROLES)}")
    if "tool_calls" in message:
        message.setdefault("content", "")
    if "content" not in message:
        raise table.mistake(row, f"{where} has no content", MESSAGE_FIX)
    if not isinstance(message["content"], str | list):
        raise table.mistake(row, f"{where}.content must be a string, got {kind(message['content'])}", MESSAGE_FIX)
    return message


def read_images(
    table: Table, row: Row, messages: tuple[Mapping[str, Any], ...], columns: dict[str, Any]
) -> tuple[Mapping[str, Any], ...]:
    """Messages with the images in their content and in the row's column of images, which is removed from `columns`.
    Relative paths count from the folder of the data file."""
    column = next((name for name in IMAGE_COLUMNS if _holds_images(columns.get(name))), None)
    if column is None and any(columns.get(name) for name in IMAGE_COLUMNS) and any(map(has_marker, messages)):
        fix = "give paths, bytes, PIL images or {bytes, path}"
        raise table.mistake(row, f"a column of images without any, but the messages have the marker {MARKER}", fix)
    if column is None and not any(isinstance(message["content"], list) for message in messages):
        return messages
    place = table.place(row)
    try:
        if column is not None:
            value = columns.pop(column)
            messages = tuple(place_images(messages, value if isinstance(value, list) else [value], place))
        if not any(has_images(message["content"]) for message in messages):
            return messages
        return with_images(messages, place, table.path.parent)
    except ImageMistake as error:
        raise table.mistake(row, str(error).removeprefix(f"{place}: ")) from error


def _holds_images(value: Any) -> bool:
    """Whether a column called like one of images holds some: data without images may have one too."""
    values = value if isinstance(value, list) else [value]
    return (
        bool(values)
        and all(
            isinstance(one, bytes | Path)
            or hasattr(one, "convert")  # a PIL image
            or (isinstance(one, Mapping) and {"bytes", "path", "image", "url"} & {*one})
            or (isinstance(one, str) and (one.startswith("data:image/") or Path(one[:1024]).suffix.lower() in SUFFIXES))
            for one in values
        )
    )


# -- Rows in memory ----------------------------------------------------------------------------------------------------


def list_rows(data: Any, name: str) -> list[Any]:
    """The rows of `data`, which the user passed as the argument `name`."""
    if isinstance(data, (str, bytes)):
        raise InputError(f"{name}={data!r} is a string\n  give rows: a list of dicts, or load_dataset({data!r})")
    if isinstance(data, Mapping):
        raise InputError(
            f"{name} holds several data sets ({', '.join(map(str, data))})\n  give one of them: {name}=DATA[NAME]"
        )
    if hasattr(data, "iterrows"):  # iterating over a pandas table yields column names
        data = data.to_dict("records")
    if not isinstance(data, Iterable):
        raise InputError(f"{name} must be a Dataset or a list of dicts, got {type(data).__name__}")
    rows = list(islice(data, MAX_ROWS + 1))
    if not rows:
        raise InputError(f"{name} has no rows")
    if len(rows) > MAX_ROWS:
        raise InputError(f"{name} does not end after {MAX_ROWS} rows\n  fix: {name}=DATA.take(N)")
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
    return {str(key): list(value) if isinstance(value, tuple) else _without_arrays(value) for key, value in row.items()}


def _without_arrays(value: Any) -> Any:
    """A value with lists and numbers in place of NumPy's: pandas reads the lists of a Parquet file as arrays."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    return [_without_arrays(item) for item in value] if isinstance(value, list) else value
