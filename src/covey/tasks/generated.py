"""Generated tasks: Covey's own problem families and those of the package reasoning-gym.

Neither needs files, and no validation problem is ever trained on. For Covey's families, a digest of the problem's key
(for `sort` the set of numbers in any order) assigns it to training or validation, whatever the seeds and sizes. The
stream of validation problems does not depend on the seed, so runs with different seeds are validated on the same ones.

`data=reasoning_gym` (https://github.com/open-thought/reasoning-gym) takes a family of that package as
`data.options.dataset` (leg_counting, basic_arithmetic, …); all other options are that family's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from hashlib import blake2b
from random import Random
from typing import Any, Protocol, TypeVar, runtime_checkable

from covey.config.schema import DataConfig
from covey.errors import InputError, unknown
from covey.imports import require
from covey.streams import stream
from covey.tasks.datasets.dataset import normalize_question
from covey.tasks.gui_pages import GuiPages
from covey.tasks.problems import Arithmetic, Calculator, Countdown, Largest, Problem, Sort, in_validation
from covey.types import Demonstration, Task, TaskSet

Item = TypeVar("Item")


class GeneratedTask(Protocol):
    """A family of problems: a dataclass whose fields are its options, validated on construction."""

    @property
    def reward(self) -> str: ...

    @property
    def system(self) -> str | None: ...

    @property
    def examples(self) -> int:
        """The number of worked examples before each question. Their problems are in neither split."""
        ...

    def draw(self, rng: Random) -> Problem: ...


@runtime_checkable
class Demonstrated(Protocol):
    """A family of problems that can also generate demonstrations."""

    @property
    def tools(self) -> tuple[str, ...]:
        """The names of the tools that its demonstrations call."""
        ...

    def demonstrate(self, rng: Random) -> tuple[str, tuple[dict[str, Any], ...]]:
        """A problem's key, and a conversation that solves it. Demonstrated problems are never drawn."""
        ...


GENERATED: dict[str, type[GeneratedTask]] = {
    "sort": Sort,
    "arithmetic": Arithmetic,
    "largest": Largest,
    "countdown": Countdown,
    "calculator": Calculator,
    "gui_pages": GuiPages,
}


def generate(name: str, options: Mapping[str, Any], *, seed: int, train_size: int, validation_size: int) -> TaskSet:
    task = make(name, options)
    examples = _problems(task, stream("examples", name), task.examples, lambda key: True)
    if len(examples) < task.examples:
        raise InputError(f"data.options.examples={task.examples}, but {name} has {len(examples)} problems to show")
    shown = {problem.key for problem in examples}
    train = _problems(
        task, stream("train", name, seed), train_size, lambda key: key not in shown and not in_validation(key)
    )
    validation = _problems(
        task, stream("validation", name), validation_size, lambda key: key not in shown and in_validation(key)
    )
    if not train:
        raise InputError(
            f"{name} has no training problems with these options\n  fix: ask for more digits or fewer examples"
        )
    warnings = [
        f"{name} has {len(problems)} distinct {split} problems with these options, fewer than the {size} asked for"
        for split, problems, size in (("training", train, train_size), ("validation", validation, validation_size))
        if len(problems) < size
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
    """Disjoint training and validation demonstrations, and the names of the tools they call."""
    task = make(name, options)
    if not isinstance(task, Demonstrated):
        known = [name for name, family in GENERATED.items() if hasattr(family, "demonstrate")]
        raise InputError(
            f"data={name} has tasks but no demonstrations to imitate\n"
            f"  give a file: data.train_files=demos.jsonl, or use data={' or data='.join(known)}"
        )

    def draw(rng: Random, size: int, accept: Callable[[str], bool]) -> list[Demonstration]:
        conversations = _distinct(lambda: task.demonstrate(rng), size, accept)
        return [Demonstration(key, messages, place=key) for key, messages in conversations.items()]

    train = draw(stream("demonstrations", name, seed), train_size, lambda key: not in_validation(key))
    validation = draw(stream("shown validation", name), validation_size, in_validation)
    return train, validation, task.tools


def make(name: str, options: Mapping[str, Any]) -> GeneratedTask:
    """The named family with its options."""
    if name not in GENERATED:
        raise unknown("task", name, GENERATED)
    known = [field.name for field in fields(GENERATED[name])]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            raise unknown(f"option of task {name}", option, known)
    return GENERATED[name](**options)


def _problems(task: GeneratedTask, rng: Random, size: int, accept: Callable[[str], bool]) -> list[Problem]:
    def draw() -> tuple[str, Problem]:
        problem = task.draw(rng)
        return problem.key, problem

    return list(_distinct(draw, size, accept).values())


def _distinct(draw: Callable[[], tuple[str, Item]], size: int, accept: Callable[[str], bool]) -> dict[str, Item]:
    """`size` items with distinct accepted keys, or all there are.

    The search ends after 100 misses in a row per item so far (and at least 10,000). If one item is left, with one in
    five draws in validation and all equally likely, the odds of missing it are below 1e-8.
    """
    items: dict[str, Item] = {}
    misses = 0
    while len(items) < size and misses < 100 * (len(items) + 100):
        key, item = draw()
        if key in items or not accept(key):
            misses += 1
        else:
            items[key] = item
            misses = 0
    return items


def _task(task: GeneratedTask, examples: list[Problem], problem: Problem) -> Task:
    messages = [{"role": "system", "content": task.system}] if task.system is not None else []
    for example in examples:
        messages.append({"role": "user", "content": example.question})
        messages.append({"role": "assistant", "content": example.answer or ""})
    messages.append({"role": "user", "content": problem.question})
    return Task(problem.key, tuple(messages), problem.answer, problem.columns)


# -- reasoning-gym -----------------------------------------------------------------------------------------------------

REASONING_GYM = "reasoning_gym"
PROMPT = "\n\nGive the final answer inside <answer> and </answer>."
TRAIN, VALIDATION = 2000, 200


def load_reasoning_gym(data: DataConfig, seed: int) -> TaskSet:
    options = dict(data.options)
    name = options.pop("dataset", None)
    _check_reasoning_gym(name, options)
    validation = _entries(name, options, _seed("validation", name), data.val_size or VALIDATION)
    held_out = {normalize_question(entry["question"]) for entry in validation}
    drawn = _entries(name, options, _seed("train", name, seed), data.train_size or TRAIN)
    train = [entry for entry in drawn if normalize_question(entry["question"]) not in held_out]
    if not train:
        raise InputError(
            f"reasoning_gym: every training problem of {name} is also in validation\n  fix: choose harder options"
        )
    warnings = []
    if overlap := len(drawn) - len(train):
        warnings.append(
            f"reasoning_gym: {overlap} of {len(drawn)} problems of {name} are also in validation, and removed"
        )
    description = f"reasoning_gym, {name}: {len(train)} training and {len(validation)} validation tasks, generated"
    return TaskSet(
        tuple(_entry_task(name, options, f"{name}/train/{n}", entry) for n, entry in enumerate(train)),
        tuple(_entry_task(name, options, f"{name}/validation/{n}", entry) for n, entry in enumerate(validation)),
        REASONING_GYM,
        description,
        tuple(warnings),
    )


def _check_reasoning_gym(name: Any, options: Mapping[str, Any]) -> None:
    need = "data=reasoning_gym needs the package reasoning-gym"
    known = require("reasoning_gym.factory", "reasoning-gym", need).DATASETS
    if name is None:
        raise InputError("data=reasoning_gym: which of its data sets?\n  fix: data.options.dataset=leg_counting")
    if name not in known:
        raise unknown("data set of reasoning_gym", str(name), known)
    for option, instead in (("size", "data.train_size and data.val_size"), ("seed", "seed")):
        if option in options:
            raise InputError(f"data.options.{option} cannot be set for reasoning_gym\n  fix: use {instead}")


def _entries(name: str, options: Mapping[str, Any], seed: int, size: int) -> list[dict[str, Any]]:
    """Distinct problems in the package's form: {question, answer, metadata}."""
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    arguments = dict(options)
    if name == "composite":
        parts = [{"weight": 1.0, "config": {}} | part for part in arguments["datasets"]]
        arguments["datasets"] = [DatasetSpec(**part) for part in parts]
    try:
        entries = reasoning_gym.create_dataset(name, size=size, seed=seed, **arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(f"reasoning_gym refuses these options of {name}: {error}") from error
    by_question = {normalize_question(entry["question"]): entry for entry in (entries[i] for i in range(size))}
    return list(by_question.values())


def _seed(*parts: Any) -> int:
    """A seed from a digest: in this package, neighbouring seeds share most of their problems."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=4).digest(), "big") >> 1


def _entry_task(name: str, options: Mapping[str, Any], task_id: str, entry: Mapping[str, Any]) -> Task:
    question = {"role": "user", "content": entry["question"].rstrip() + PROMPT}
    columns = {"dataset": name, "dataset_options": dict(options), "entry": dict(entry)}
    return Task(task_id, (question,), entry["answer"], columns)
