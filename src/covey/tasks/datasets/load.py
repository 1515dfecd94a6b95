"""The data sets, by name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.config.schema import DataConfig
from covey.errors import Absent, InputError, nearest, unknown
from covey.storage import sha256
from covey.tasks.datasets.code_and_tool_sets import BFCL, HUMANEVAL, MBPP, MBPP_SANITIZED, RLLA
from covey.tasks.datasets.dataset import TEST, TRAIN, Choice, Dataset, asked
from covey.tasks.datasets.math_sets import AIME24, AMC23, DAPO_MATH, DEEPSCALER, GSM8K, MATH, MATH_500
from covey.tasks.datasets.question_sets import HOTPOTQA, IFEVAL, MUSIQUE, WIKI2
from covey.tasks.reading import read_table
from covey.types import Task, TaskSet

DATASETS: dict[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        GSM8K,
        MATH,
        MATH_500,
        AIME24,
        AMC23,
        DEEPSCALER,
        DAPO_MATH,
        IFEVAL,
        HOTPOTQA,
        MUSIQUE,
        WIKI2,
        MBPP,
        MBPP_SANITIZED,
        HUMANEVAL,
        BFCL,
        RLLA,
    )
}


# -- Prepared sets into tasks. They lie in DATA_DIR/NAME: one Parquet file per split, and manifest.json ----------------

MANIFEST = "manifest.json"


def data_folder(name: str) -> Path:
    """Where a set lies when it is prepared."""
    return Path(os.environ.get("DATA_DIR") or "data").expanduser() / name


def is_prepared(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def load_dataset(data: DataConfig) -> TaskSet:
    dataset = DATASETS[data.name]
    manifest = read_manifest(data.name)
    warnings: list[str] = []
    held_out = _split(dataset, manifest, data.options)
    learned = _tasks(dataset, manifest, TRAIN, data.options)
    tested = _tasks(dataset, manifest, held_out, data.options) if held_out else _elsewhere(dataset, warnings)
    if "held_out" in data.options:
        learned, tested = _set_apart(tested, data.options["held_out"])
    train = _first(learned, "train", data.train_size, warnings)
    validation = _first(tested, "val", data.val_size, warnings)
    parts = [f"{len(tasks)} {split}" for split, tasks in (("training", train), ("validation", validation)) if tasks]
    about = f"{data.name} ({data_folder(data.name)}): {' and '.join(parts) or 'no'} tasks"
    return TaskSet(train, validation, dataset.reward, about, tuple(warnings))


def read_manifest(name: str, folder: Path | None = None) -> dict[str, Any]:
    path = (folder or data_folder(name)) / MANIFEST
    if not path.is_file():
        raise Absent(
            f"data={name} is not prepared: there is no {path}\n"
            f"  fix: covey data prepare {name}     (or set DATA_DIR to the folder that holds {name}/)"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{path}: cannot be read ({error!s:.200})\n  fix: covey data prepare {name}") from None
    whole = isinstance(found, dict) and all(isinstance(found.get(key), dict) for key in ("rows", "outputs"))
    if not whole or found.get("name") != name:
        of = f"is of {found.get('name')!r:.60}, not of {name}" if whole else "is no manifest of a data set"
        raise InputError(f"{path} {of}\n  fix: covey data prepare {name}")
    manifest: dict[str, Any] = found
    return manifest


def read_rows(
    dataset: Dataset, manifest: Mapping[str, Any], split: str, folder: Path | None = None
) -> list[dict[str, Any]]:
    """The rows of one split as they were prepared. A file that has changed since is refused."""
    if split not in manifest["rows"]:
        return []
    path = (folder or data_folder(dataset.name)) / f"{split}.parquet"
    written = manifest["outputs"].get(path.name)
    if not path.is_file() or not isinstance(written, dict) or sha256(path) != written.get("sha256"):
        what = "has changed since it was prepared" if path.is_file() else "is missing"
        raise InputError(f"{path} {what}\n  fix: covey data prepare {dataset.name}")
    rows = [row.values for row in read_table(path).rows]
    for row in rows:
        for column in dataset.packed:
            row[column] = json.loads(row[column])
    return rows


def _tasks(dataset: Dataset, manifest: Mapping[str, Any], split: str, options: Mapping[str, Any]) -> list[Task]:
    rows = read_rows(dataset, manifest, split)
    for name, choice in dataset.choices.items():
        rows = _chosen(rows, name, choice, options.get(name, choice.default))
    prompt = _prompt(dataset, options)
    return [_task(dataset, row, prompt) for row in rows]


def question_messages(dataset: Dataset, question: str, options: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """A question from outside the set with the set's prompt around it, unless the prompt needs more columns."""
    prompt = _prompt(dataset, options)
    fits = dataset.messages is asked and "{question}" in prompt
    return asked({"question": question}, prompt if fits else "{question}")


def _task(dataset: Dataset, row: Mapping[str, Any], prompt: str) -> Task:
    columns = {k: v for k, v in row.items() if k not in ("data_id", "question", "messages", "answer")}
    return Task(str(row["data_id"]), tuple(dataset.messages(row, prompt)), row.get("answer"), columns)


def _chosen(rows: list[dict[str, Any]], name: str, choice: Choice, wanted: Any) -> list[dict[str, Any]]:
    if wanted is None or not rows:
        return rows
    values = list(wanted) if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted]
    there = {row.get(choice.column) for row in rows}
    if choice.default is None or list(values) != list(choice.default):
        for value in values:
            if value not in there and not isinstance(value, bool):
                raise unknown(f"value of data.options.{name}", str(value), [str(one) for one in there])
    return [row for row in rows if row.get(choice.column) in values]


def _prompt(dataset: Dataset, options: Mapping[str, Any]) -> str:
    prompt = options.get("prompt", dataset.prompt)
    place = "{function}" if "{function}" in dataset.prompt else "{question}"
    if not isinstance(prompt, str) or place not in prompt:
        raise InputError(f"data.options.prompt must be a text with {place} in it, got {prompt!r}")
    return prompt


def _split(dataset: Dataset, manifest: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """What is tested on; and all options are known."""
    for option in options:
        if option not in dataset.option_names:
            raise unknown(f"option of data={dataset.name}", option, dataset.option_names)
    there = [split for split in manifest["rows"] if split != TRAIN]
    split = options.get("split", TEST)
    if "split" in options and split not in there:
        hint = f" (did you mean {guess}?)" if (guess := nearest(str(split), there)) else ""
        raise InputError(
            f"data.options.split={split}{hint}: {dataset.name} has {', '.join(there) or 'none to test on'}"
        )
    return split if split in there else None


def _elsewhere(dataset: Dataset, warnings: list[str]) -> list[Task]:
    """The sets that this one is tested on, those that are here."""
    found: list[Task] = []
    for name in dataset.evaluated_on:
        if is_prepared(data_folder(name)):
            found += _tasks(DATASETS[name], read_manifest(name), TEST, {})
        else:
            warnings.append(f"{dataset.name} is tested on {name}, which is not prepared: covey data prepare {name}")
    return found


def _set_apart(tasks: list[Task], count: Any) -> tuple[list[Task], list[Task]]:
    """Of a set that is one list: what to train on, and `count` tasks, evenly spread, to test on."""
    if not isinstance(count, int) or not 1 <= count < len(tasks):
        raise InputError(f"data.options.held_out must be a number from 1 to {len(tasks) - 1}, got {count}")
    apart = {index * len(tasks) // count for index in range(count)}
    learned = [task for index, task in enumerate(tasks) if index not in apart]
    return learned, [task for index, task in enumerate(tasks) if index in apart]


def _first(tasks: list[Task], split: str, size: int | None, warnings: list[str]) -> tuple[Task, ...]:
    if size is not None and tasks and size > len(tasks):
        warnings.append(f"data.{split}_size={size}, but there are only {len(tasks)} tasks")
    return tuple(tasks[:size])
