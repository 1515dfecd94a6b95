"""All data sets by name, and loading a prepared one as tasks.

A prepared set is a folder DATA_DIR/NAME with one Parquet file per split and manifest.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.config.schema import DataConfig
from covey.errors import Absent, InputError, nearest, unknown
from covey.imports import LazyTable
from covey.storage import sha256
from covey.tasks.datasets.dataset import TEST, TRAIN, Choice, Dataset, user_message
from covey.tasks.reading import read_table
from covey.types import Task, TaskSet

SETS = "covey.tasks.datasets."
DATASETS: Mapping[str, Dataset] = LazyTable(
    {
        "gsm8k": SETS + "math_sets:GSM8K",
        "math": SETS + "math_sets:MATH",
        "math500": SETS + "math_sets:MATH_500",
        "aime24": SETS + "math_sets:AIME24",
        "amc23": SETS + "math_sets:AMC23",
        "deepscaler": SETS + "math_sets:DEEPSCALER",
        "dapo_math": SETS + "math_sets:DAPO_MATH",
        "ifeval": SETS + "question_sets:IFEVAL",
        "hotpotqa": SETS + "question_sets:HOTPOTQA",
        "musique": SETS + "question_sets:MUSIQUE",
        "2wiki": SETS + "question_sets:WIKI2",
        "mbpp": SETS + "code_and_tool_sets:MBPP",
        "mbpp_sanitized": SETS + "code_and_tool_sets:MBPP_SANITIZED",
        "humaneval": SETS + "code_and_tool_sets:HUMANEVAL",
        "bfcl": SETS + "code_and_tool_sets:BFCL",
        "rlla": SETS + "code_and_tool_sets:RLLA",
    }
)

MANIFEST = "manifest.json"


def data_folder(name: str) -> Path:
    """The folder of a prepared set."""
    return Path(os.environ.get("DATA_DIR") or "data").expanduser() / name


def is_prepared(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def load_dataset(data: DataConfig) -> TaskSet:
    dataset = DATASETS[data.name]
    manifest = read_manifest(data.name)
    warnings: list[str] = []
    split = _validation_split(dataset, manifest, data.options)
    train = _tasks(dataset, manifest, TRAIN, data.options)
    validation = _tasks(dataset, manifest, split, data.options) if split else _other_validation(dataset, warnings)
    if "held_out" in data.options:
        train, validation = hold_out(dataset, validation, data.options["held_out"])
    for name, tasks, size in (("train", train, data.train_size), ("val", validation, data.val_size)):
        if size is not None and tasks and size > len(tasks):
            warnings.append(f"data.{name}_size={size}, but there are only {len(tasks)} tasks")
    train, validation = train[: data.train_size], validation[: data.val_size]
    parts = [f"{len(tasks)} {kind}" for kind, tasks in (("training", train), ("validation", validation)) if tasks]
    description = f"{data.name} ({data_folder(data.name)}): {' and '.join(parts) or 'no'} tasks"
    return TaskSet(tuple(train), tuple(validation), dataset.reward, description, tuple(warnings))


def read_manifest(name: str, folder: Path | None = None) -> dict[str, Any]:
    path = (folder or data_folder(name)) / MANIFEST
    if not path.is_file():
        raise Absent(
            f"data={name} is not prepared: there is no {path}\n"
            f"  fix: covey data prepare {name}     (or set DATA_DIR to the folder that holds {name}/)"
        )
    try:
        manifest: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{path}: cannot be read ({error!s:.200})\n  fix: covey data prepare {name}") from None
    valid = isinstance(manifest, dict) and all(isinstance(manifest.get(key), dict) for key in ("rows", "outputs"))
    if not valid or manifest.get("name") != name:
        problem = f"is of {manifest.get('name')!r:.60}, not of {name}" if valid else "is not the manifest of a data set"
        raise InputError(f"{path} {problem}\n  fix: covey data prepare {name}")
    return dict(manifest)


def read_rows(
    dataset: Dataset, manifest: Mapping[str, Any], split: str, folder: Path | None = None
) -> list[dict[str, Any]]:
    """The rows of one split of a prepared set. A file that has changed since is refused."""
    if split not in manifest["rows"]:
        return []
    path = (folder or data_folder(dataset.name)) / f"{split}.parquet"
    written = manifest["outputs"].get(path.name)
    if not path.is_file() or not isinstance(written, dict) or sha256(path) != written.get("sha256"):
        problem = "has changed since it was prepared" if path.is_file() else "is missing"
        raise InputError(f"{path} {problem}\n  fix: covey data prepare {dataset.name}")
    rows = [row.values for row in read_table(path).rows]
    for row in rows:
        for column in dataset.json_columns:
            row[column] = json.loads(row[column])
    return rows


def _tasks(dataset: Dataset, manifest: Mapping[str, Any], split: str, options: Mapping[str, Any]) -> list[Task]:
    rows = read_rows(dataset, manifest, split)
    for name, choice in dataset.choices.items():
        rows = _filtered(rows, name, choice, options.get(name, choice.default))
    prompt = _prompt(dataset, options)
    tasks = []
    for row in rows:
        columns = {k: v for k, v in row.items() if k not in ("data_id", "question", "messages", "answer")}
        messages = tuple(dataset.messages(row, prompt))
        tasks.append(Task(str(row["data_id"]), messages, row.get("answer"), columns))
    return tasks


def question_messages(dataset: Dataset, question: str, options: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """A question from outside the set with the set's prompt around it, unless the prompt needs more columns."""
    prompt = _prompt(dataset, options)
    fits = dataset.messages is user_message and "{question}" in prompt
    return user_message({"question": question}, prompt if fits else "{question}")


def _filtered(rows: list[dict[str, Any]], name: str, choice: Choice, option: Any) -> list[dict[str, Any]]:
    if option is None or not rows:
        return rows
    values = list(option) if isinstance(option, Sequence) and not isinstance(option, str) else [option]
    available = {row.get(choice.column) for row in rows}
    if choice.default is None or list(values) != list(choice.default):
        for value in values:
            if value not in available and not isinstance(value, bool):
                raise unknown(f"value of data.options.{name}", str(value), [str(one) for one in available])
    return [row for row in rows if row.get(choice.column) in values]


def _prompt(dataset: Dataset, options: Mapping[str, Any]) -> str:
    prompt = options.get("prompt", dataset.prompt)
    placeholder = "{function}" if "{function}" in dataset.prompt else "{question}"
    if not isinstance(prompt, str) or placeholder not in prompt:
        raise InputError(f"data.options.prompt must be a text with {placeholder} in it, got {prompt!r}")
    return prompt


def _validation_split(dataset: Dataset, manifest: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """The split to validate on. Also checks the names of all options."""
    for option in options:
        if option not in dataset.option_names:
            raise unknown(f"option of data={dataset.name}", option, dataset.option_names)
    available = [split for split in manifest["rows"] if split != TRAIN]
    split = options.get("split", TEST)
    if "split" in options and split not in available:
        hint = f" (did you mean {guess}?)" if (guess := nearest(str(split), available)) else ""
        raise InputError(
            f"data.options.split={split}{hint}: {dataset.name} has {', '.join(available) or 'none to test on'}"
        )
    return split if split in available else None


def _other_validation(dataset: Dataset, warnings: list[str]) -> list[Task]:
    """The tasks of the prepared sets among those that this one is evaluated on."""
    tasks: list[Task] = []
    for name in dataset.evaluated_on:
        if is_prepared(data_folder(name)):
            tasks += _tasks(DATASETS[name], read_manifest(name), TEST, {})
        else:
            warnings.append(f"{dataset.name} is tested on {name}, which is not prepared: covey data prepare {name}")
    return tasks


def hold_out(dataset: Dataset, tasks: Sequence[Task], held_out: Any) -> tuple[list[Task], list[Task]]:
    """Split a set without training rows into training and validation tasks. `held_out`: a number of evenly spread
    validation tasks; or kinds, where the set has any: training tasks have none of them, validation tasks no others."""
    if isinstance(held_out, Sequence) and not isinstance(held_out, str) and dataset.kinds is not None:
        return _hold_out_kinds(dataset.kinds, tasks, [str(kind) for kind in held_out])
    if not isinstance(held_out, int) or not 1 <= held_out < len(tasks):
        raise InputError(f"data.options.held_out must be a number from 1 to {len(tasks) - 1}, got {held_out}")
    chosen = {index * len(tasks) // held_out for index in range(held_out)}
    train = [task for index, task in enumerate(tasks) if index not in chosen]
    return train, [task for index, task in enumerate(tasks) if index in chosen]


def _hold_out_kinds(
    kinds: Callable[[Mapping[str, Any]], Collection[str]], tasks: Sequence[Task], held_out: Sequence[str]
) -> tuple[list[Task], list[Task]]:
    """A kind GROUP:NAME is held out by its name or by its group. Tasks with kinds of both sides are dropped."""

    def is_held_out(kind: str) -> bool:
        return kind in held_out or kind.partition(":")[0] in held_out

    existing = {kind for task in tasks for kind in kinds(task.columns)}
    names = {*existing, *(kind.partition(":")[0] for kind in existing)}
    for name in held_out:
        if name not in names:
            raise unknown("kind in data.options.held_out", name, sorted(names))
    train = [task for task in tasks if not any(map(is_held_out, kinds(task.columns)))]
    validation = [task for task in tasks if all(map(is_held_out, kinds(task.columns)))]
    if not train or not validation:
        raise InputError("data.options.held_out leaves no tasks to train on, or none to test on\n  fix: other kinds")
    return train, validation
