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

from covey.errors import InputError, unknown
from covey.tasks.calculator import Calculator
from covey.tasks.countdown import Countdown
from covey.tasks.numbers import Arithmetic, Largest, Sort
from covey.tasks.problem import Problem
from covey.tasks.seeds import stream
from covey.tasks.taskset import TaskSet
from covey.types import Demonstration, Task

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
