"""The tasks of a run: from files where files are given, else a prepared data set or a generated task by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from covey.config.schema import DataConfig
from covey.errors import Absent, InputError, unknown
from covey.streams import stream
from covey.tasks.datasets import DATASETS, load_dataset
from covey.tasks.datasets.load import question_messages
from covey.tasks.files import find_files, read_tasks
from covey.tasks.generated import GENERATED, REASONING_GYM, generate, load_reasoning_gym, make
from covey.types import Task, TaskSet

GENERATED_TRAIN = 2000
GENERATED_VALIDATION = 200
MATHEMATICAL = "math_verify"
# The last line of a worked solution: GSM8K's `#### 72`, or MATH's `\boxed{…}` with what may stand behind it.
MARKED = re.compile(r"(?:####[ \t]*[^\s#][^\n]*|\\boxed[ \t]*\{[^\n]*\}[^\n\w]*)\s*\Z")


def load_tasks(data: DataConfig, seed: int) -> TaskSet:
    """Everything `data` names. `seed` decides which problems a generated task trains on, never what it is tested on."""
    given = data.train_files is not None or data.val_files is not None
    tasks = _from_files(data) if given else _named(data, seed)
    return with_system_prompt(tasks, data.system_prompt)


def with_system_prompt(tasks: TaskSet, prompt: str | None) -> TaskSet:
    """`data.system_prompt` before every task that has no system message of its own."""
    if prompt is None:
        return tasks
    train, validation = _prompted(tasks.train, prompt), _prompted(tasks.validation, prompt)
    warnings = tasks.warnings
    if train == tasks.train and validation == tasks.validation:
        warnings += ("data.system_prompt is not used: every task brings a system message of its own",)
    return replace(tasks, train=train, validation=validation, warnings=warnings)


def _named(data: DataConfig, seed: int) -> TaskSet:
    if data.name in DATASETS:
        return load_dataset(data)
    if data.name == REASONING_GYM:
        return load_reasoning_gym(data, seed)
    if data.name not in GENERATED:
        raise unknown("task", data.name, [*GENERATED, *DATASETS, REASONING_GYM])
    return _generated(data, seed)


def _generated(data: DataConfig, seed: int) -> TaskSet:
    return generate(
        data.name,
        data.options,
        seed=seed,
        train_size=data.train_size or GENERATED_TRAIN,
        validation_size=data.val_size or GENERATED_VALIDATION,
    )


def _from_files(data: DataConfig) -> TaskSet:
    warnings: list[str] = []
    if data.options:
        warnings.append("data.options is not used: it belongs to generated tasks, and data files are given")
    absent: list[Absent] = []
    train = _files("train", data.train_files, data.train_size, warnings, absent)
    validation = _files("val", data.val_files, data.val_size, warnings, absent)
    if absent:
        raise Absent("\n".join(map(str, absent)))
    trained_on = {_question(task) for task in train}
    if leaked := [task for task in validation if _question(task) in trained_on]:
        warnings.append(
            f"{len(leaked)} of {len(validation)} validation tasks ask a question that is trained on, "
            f"the first is {leaked[0].id}"
        )
    parts = []
    if train:
        parts.append(f"{len(train)} training tasks from {_listed(data.train_files)}")
    if validation:
        parts.append(f"{len(validation)} validation tasks from {_listed(data.val_files)}")
    return TaskSet(train, validation, default_reward(data, (*train, *validation)), ", ".join(parts), tuple(warnings))


def _files(split: str, files: object, size: int | None, warnings: list[str], absent: list[Absent]) -> tuple[Task, ...]:
    if files is None:
        return ()
    try:
        tasks = read_tasks(f"data.{split}_files", files)
    except Absent as error:
        absent.append(error)
        return ()
    if size is not None and size > len(tasks):
        warnings.append(f"data.{split}_size={size}, but there are only {len(tasks)} tasks")
    return tuple(tasks[:size])


def _listed(files: object) -> str:
    paths = find_files("data", files)
    return str(paths[0]) if len(paths) == 1 else f"{len(paths)} files"


def _question(task: Task) -> str:
    """The last message's text, for comparing tasks: white space does not make another question."""
    return " ".join(str(task.messages[-1]["content"]).split())


def _prompted(tasks: Sequence[Task], system_prompt: str) -> tuple[Task, ...]:
    system = {"role": "system", "content": system_prompt}
    return tuple(
        task if task.messages[0]["role"] == "system" else replace(task, messages=(system, *task.messages))
        for task in tasks
    )


def default_reward(data: DataConfig, tasks: Sequence[Task] = ()) -> str | None:
    """The reward where the user names none. Files that take the place of a data set, as on top of a recipe, are scored
    by the data set's reward. `data.name` at its default names no data set for them."""
    files = data.train_files is not None or data.val_files is not None
    if files and data.name == DataConfig().name:
        return reward_by_answers(tasks)
    if data.name == REASONING_GYM:
        return REASONING_GYM
    if data.name in DATASETS:
        return DATASETS[data.name].reward
    return make(data.name, data.options).reward if data.name in GENERATED else None


def reward_by_answers(tasks: Sequence[Task]) -> str | None:
    """The mathematical reward where most answers end in `#### N` or `\\boxed{…}`: compared as text, a reply would have
    to repeat the whole worked solution."""
    answers = [task.answer for task in tasks if task.answer is not None]
    marked = sum(isinstance(answer, str) and MARKED.search(answer) is not None for answer in answers)
    return MATHEMATICAL if 2 * marked > len(answers) else None


def nothing_to_train_on(data: DataConfig) -> InputError:
    if data.train_files is None and data.val_files is None:
        apart = data.name in DATASETS and "held_out" in DATASETS[data.name].option_names
        fix = "data.options.held_out=100 evaluates on 100 of its tasks and trains on the others; or " if apart else ""
        return InputError(
            f"data={data.name} is for evaluation: there is nothing in it to train on\n"
            f"  fix: {fix}covey eval MODEL data={data.name}, or train on another set"
        )
    return InputError("there is nothing to train on: data.val_files is given without data.train_files")


# -- A question of the user's own, asked as the tasks of a run are: with their system prompt and worked examples -------

QUESTION = "question"  # the id of such a task


def plain_question(question: str, data: DataConfig) -> Task:
    """The question and nothing else but data.system_prompt."""
    return _with_worked_examples(({"role": "user", "content": question},), data)


def ask_like_tasks(question: str, data: DataConfig, seed: int) -> Task:
    """The messages that training would give a task with this question."""
    if data.train_files is None and data.val_files is None and data.name in DATASETS:
        return _with_worked_examples(question_messages(DATASETS[data.name], question, data.options), data)
    tasks = load_tasks(data, seed)
    context = shared_context([*tasks.train, *tasks.validation])
    return Task(QUESTION, (*context, {"role": "user", "content": question}))


def shared_context(tasks: Sequence[Task]) -> tuple[Mapping[str, Any], ...]:
    """The messages that all tasks begin with, before the question: a system prompt, worked examples."""
    if not tasks:
        return ()
    shared = list(tasks[0].messages[:-1])
    for task in tasks[1:]:
        same = 0
        for ours, theirs in zip(shared, task.messages[:-1], strict=False):
            if ours != theirs:
                break
            same += 1
        del shared[same:]
    while shared and shared[-1]["role"] == "user":  # its reply differs from task to task
        shared.pop()
    return tuple(shared)


def _with_worked_examples(messages: Sequence[Mapping[str, Any]], data: DataConfig) -> Task:
    alone = TaskSet((), (Task(QUESTION, tuple(messages)),), reward=None, description=QUESTION)
    return with_system_prompt(alone, data.system_prompt).validation[0]


# -- Which tasks a step trains on. The order of an epoch depends on (seed, epoch) alone, so a resumed run finds the ba--
# of any step without replaying the steps before it.

Item = TypeVar("Item")


def steps_per_epoch(tasks: int, batch_size: int) -> int:
    """Whole batches in one pass. The short rest is left out, unless it is all there is."""
    if tasks < 1:
        raise InputError("there are no training tasks\n  fix: give data.train_files, or a generated task as data.name")
    return max(1, tasks // batch_size)


def batch_for_step(
    tasks: Sequence[Item], step: int, batch_size: int, *, seed: int, shuffle: bool
) -> tuple[int, list[Item]]:
    """The epoch that step (from 0) belongs to, and its tasks (or demonstrations). No batch mixes two epochs."""
    epoch, index = divmod(step, steps_per_epoch(len(tasks), batch_size))
    order = list(range(len(tasks)))
    if shuffle:
        stream("order", seed, epoch).shuffle(order)
    return epoch, [tasks[i] for i in order[index * batch_size : (index + 1) * batch_size]]


def fresh_tasks(
    tasks: Sequence[Task], step: int, round: int, count: int, *, seed: int, tried: Collection[str]
) -> list[Task]:
    """Up to `count` tasks that this step has not tried yet, to replace some that taught nothing."""
    order = [task for task in tasks if task.id not in tried]
    stream("fresh", seed, step, round).shuffle(order)
    return order[:count]
