"""Tasks of the package reasoning-gym (https://github.com/open-thought/reasoning-gym): `data=reasoning_gym`.

`data.options.dataset` names one of its families (leg_counting, basic_arithmetic, …); all other options are that
family's own. Problems to train on and to be tested on come from streams of their own, and no question is in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from covey.config.schema import DataConfig
from covey.errors import Absent, InputError, unknown
from covey.install import install_extra
from covey.tasks.datasets.text import normal
from covey.tasks.taskset import TaskSet
from covey.types import Task

REASONING_GYM = "reasoning_gym"
PROMPT = "\n\nGive the final answer inside <answer> and </answer>."
TRAIN, VALIDATION = 2000, 200


def load_reasoning_gym(data: DataConfig, seed: int) -> TaskSet:
    options = dict(data.options)
    name = options.pop("dataset", None)
    _check(name, options)
    held_out = _entries(name, options, _seed("validation", name), data.val_size or VALIDATION)
    tested = {normal(entry["question"]) for entry in held_out}
    drawn = _entries(name, options, _seed("train", name, seed), data.train_size or TRAIN)
    train = [entry for entry in drawn if normal(entry["question"]) not in tested]
    if not train:
        raise InputError(f"reasoning_gym: every training problem of {name} is also tested on\n  ask for harder ones")
    warnings = []
    if len(train) < len(drawn):
        left = len(drawn) - len(train)
        warnings.append(f"reasoning_gym: {left} of {len(drawn)} problems of {name} are tested on, and not trained on")
    about = f"reasoning_gym, {name}: {len(train)} training and {len(held_out)} validation tasks, generated"
    return TaskSet(
        tuple(_task(name, options, f"{name}/train/{n}", entry) for n, entry in enumerate(train)),
        tuple(_task(name, options, f"{name}/validation/{n}", entry) for n, entry in enumerate(held_out)),
        REASONING_GYM,
        about,
        tuple(warnings),
    )


def _check(name: Any, options: Mapping[str, Any]) -> None:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise Absent(
            f"data=reasoning_gym needs the package reasoning-gym\n  fix: {install_extra('reasoning-gym')}"
        ) from error
    if name is None:
        raise InputError("data=reasoning_gym: which of its data sets?\n  fix: data.options.dataset=leg_counting")
    if name not in DATASETS:
        raise unknown("data set of reasoning_gym", str(name), DATASETS)
    for option, instead in (("size", "data.train_size and data.val_size"), ("seed", "seed")):
        if option in options:
            raise InputError(f"data.options.{option} is not the package's to say here\n  fix: use {instead}")


def _entries(name: str, options: Mapping[str, Any], seed: int, size: int) -> list[dict[str, Any]]:
    """Distinct problems, as the package makes them: {question, answer, metadata}."""
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    given = dict(options)
    if name == "composite":  # its parts come as tables here
        given["datasets"] = [DatasetSpec(**({"weight": 1.0, "config": {}} | part)) for part in given["datasets"]]
    try:
        made = reasoning_gym.create_dataset(name, size=size, seed=seed, **given)
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(f"reasoning_gym refuses these options of {name}: {error}") from error
    return list({normal(entry["question"]): entry for entry in (made[index] for index in range(size))}.values())


def _seed(*parts: Any) -> int:
    """Neighbouring seeds of the package share most of their problems; these have nothing in common."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=4).digest(), "big") >> 1


def _task(name: str, options: Mapping[str, Any], task_id: str, entry: Mapping[str, Any]) -> Task:
    question = {"role": "user", "content": entry["question"].rstrip() + PROMPT}
    columns = {"dataset": name, "dataset_options": dict(options), "entry": dict(entry)}
    return Task(task_id, (question,), entry["answer"], columns)
