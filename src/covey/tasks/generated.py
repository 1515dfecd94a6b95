"""Tasks that are made up on the spot: no files, exact rewards, and a validation set that is never trained on.

What makes two problems the same is their key (for `sort` the set of numbers, in whatever order they are asked). A
digest of the key, and nothing else, puts a problem into training or validation, so no problem is ever on both sides,
whatever the seeds and sizes. Validation problems are drawn with a seed of their own: runs with different seeds are
tested on the same problems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from hashlib import blake2b
from random import Random
from typing import Any, Protocol, runtime_checkable

from covey.config.schema import DataConfig
from covey.errors import Absent, InputError, unknown
from covey.imports import install_extra
from covey.streams import stream
from covey.tasks.datasets.dataset import normal
from covey.tasks.problems import Arithmetic, Calculator, Countdown, Largest, Problem, Sort
from covey.types import Demonstration, Task, TaskSet

VALIDATION_SHARE = 0.2


class GeneratedTask(Protocol):
    """A family of problems: a dataclass whose fields are its options, checked when it is made."""

    @property
    def reward(self) -> str: ...

    @property
    def system(self) -> str | None: ...

    @property
    def examples(self) -> int:
        """Worked examples before each question; their problems occur in neither split."""
        ...

    def draw(self, rng: Random) -> Problem: ...


@runtime_checkable
class Demonstrated(Protocol):
    """A family of problems that can also show how they are solved."""

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the tools that its demonstrations call."""
        ...

    def demonstrate(self, rng: Random) -> tuple[str, tuple[dict[str, Any], ...]]:
        """A problem's key, and a conversation that solves it. Problems that are shown are never drawn."""
        ...


GENERATED: dict[str, type[GeneratedTask]] = {
    "sort": Sort,
    "arithmetic": Arithmetic,
    "largest": Largest,
    "countdown": Countdown,
    "calculator": Calculator,
}


def generate(name: str, options: Mapping[str, Any], *, seed: int, train_size: int, validation_size: int) -> TaskSet:
    task = make(name, options)
    examples = _distinct(task, stream("examples", name), task.examples, lambda key: True)
    if len(examples) < task.examples:
        raise InputError(f"data.options.examples={task.examples}, but {name} has {len(examples)} problems to show")
    shown = {problem.key for problem in examples}
    train = _distinct(
        task, stream("train", name, seed), train_size, lambda key: key not in shown and not in_validation(key)
    )
    validation = _distinct(
        task, stream("validation", name), validation_size, lambda key: key not in shown and in_validation(key)
    )
    if not train:
        raise InputError(
            f"{name} has no training problems with these options\n  fix: ask for more digits or fewer examples"
        )
    warnings = [
        f"{name} has {len(found)} distinct {split} problems with these options, fewer than the {asked} asked for"
        for split, found, asked in (("training", train, train_size), ("validation", validation, validation_size))
        if len(found) < asked
    ]
    settings = ", ".join(f"{option}={value}" for option, value in asdict(task).items())  # type: ignore[call-overload]
    description = f"{name} ({settings}): {len(train)} training and {len(validation)} validation tasks, generated"
    return TaskSet(
        tuple(_task(task, examples, problem) for problem in train),
        tuple(_task(task, examples, problem) for problem in validation),
        task.reward,
        description,
        tuple(warnings),
    )


def generate_demonstrations(
    name: str, options: Mapping[str, Any], *, seed: int, train_size: int, validation_size: int
) -> tuple[list[Demonstration], list[Demonstration], tuple[str, ...]]:
    """For training and for validation, and the names of the tools that they call. None is in both."""
    task = make(name, options)
    if not isinstance(task, Demonstrated):
        known = [name for name, family in GENERATED.items() if hasattr(family, "demonstrate")]
        raise InputError(
            f"data={name} has tasks but no demonstrations to imitate\n"
            f"  give a file: data.train_files=demos.jsonl, or use data={' or data='.join(known)}"
        )
    train = _shown(task, stream("demonstrations", name, seed), train_size, lambda key: not in_validation(key))
    validation = _shown(task, stream("shown validation", name), validation_size, in_validation)
    return train, validation, task.tools


def _shown(task: Demonstrated, rng: Random, size: int, wanted: Callable[[str], bool]) -> list[Demonstration]:
    found: dict[str, Demonstration] = {}
    misses = 0
    while len(found) < size and misses < 100 * (len(found) + 100):
        key, messages = task.demonstrate(rng)
        if key in found or not wanted(key):
            misses += 1
        else:
            found[key] = Demonstration(key, messages, place=key)
            misses = 0
    return list(found.values())


def make(name: str, options: Mapping[str, Any]) -> GeneratedTask:
    """The named task with its options."""
    if name not in GENERATED:
        raise unknown("task", name, GENERATED)
    known = [field.name for field in fields(GENERATED[name])]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            raise unknown(f"option of task {name}", option, known)
    return GENERATED[name](**options)


def in_validation(key: str) -> bool:
    digest = blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < VALIDATION_SHARE * 2**64


def _distinct(task: GeneratedTask, rng: Random, size: int, wanted: Callable[[str], bool]) -> list[Problem]:
    """`size` different problems, or all there are.

    Nothing new in a hundred draws per problem found is taken for the end: were one of them left (one in five draws
    belongs to validation), the odds of missing it are below 1e-8 where all are equally likely.
    """
    found: dict[str, Problem] = {}
    misses = 0
    while len(found) < size and misses < 100 * (len(found) + 100):
        problem = task.draw(rng)
        if problem.key in found or not wanted(problem.key):
            misses += 1
        else:
            found[problem.key] = problem
            misses = 0
    return list(found.values())


def _task(task: GeneratedTask, examples: list[Problem], problem: Problem) -> Task:
    messages = [{"role": "system", "content": task.system}] if task.system is not None else []
    for example in examples:
        messages.append({"role": "user", "content": example.question})
        messages.append({"role": "assistant", "content": example.answer or ""})
    messages.append({"role": "user", "content": problem.question})
    return Task(problem.key, tuple(messages), problem.answer, problem.columns)


# -- Tasks of the package reasoning-gym (https://github.com/open-thought/reasoning-gym): `data=reasoning_gym` ----------
# `data.options.dataset` names one of its families (leg_counting, basic_arithmetic, …); all other options are that
# family's own. Problems to train on and to be tested on come from streams of their own, and no question is in both.

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
        tuple(_reasoning_gym_task(name, options, f"{name}/train/{n}", entry) for n, entry in enumerate(train)),
        tuple(_reasoning_gym_task(name, options, f"{name}/validation/{n}", entry) for n, entry in enumerate(held_out)),
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


def _reasoning_gym_task(name: str, options: Mapping[str, Any], task_id: str, entry: Mapping[str, Any]) -> Task:
    question = {"role": "user", "content": entry["question"].rstrip() + PROMPT}
    columns = {"dataset": name, "dataset_options": dict(options), "entry": dict(entry)}
    return Task(task_id, (question,), entry["answer"], columns)
