"""The tasks of a run, from files, a prepared data set or a generator; their order; and the default reward.

The order of an epoch depends only on (seed, epoch), so a resumed run finds the batch of any step without replaying the
steps before it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from covey.config.schema import DataConfig
from covey.errors import InputError, unknown
from covey.streams import stream
from covey.tasks.datasets import DATASETS, load_dataset
from covey.tasks.datasets.load import question_messages
from covey.tasks.files import find_files, prepend_system, read_splits, read_tasks
from covey.tasks.generated import GENERATED, REASONING_GYM, generate, load_reasoning_gym, make
from covey.types import Task, TaskSet

Item = TypeVar("Item")

GENERATED_TRAIN = 2000
GENERATED_VALIDATION = 200
MATHEMATICAL = "math_verify"
# The end of a worked solution: GSM8K's `#### 72`, or MATH's `\boxed{…}` with punctuation after it.
MARKED = re.compile(r"(?:####[ \t]*[^\s#][^\n]*|\\boxed[ \t]*\{[^\n]*\}[^\n\w]*)\s*\Z")


# -- Loading -----------------------------------------------------------------------------------------------------------


def load_tasks(data: DataConfig, seed: int) -> TaskSet:
    """All tasks of `data`. `seed` selects the training problems of a generated task, never its validation problems."""
    if data.train_files is not None or data.val_files is not None:
        tasks = _from_files(data)
    elif data.name in DATASETS:
        tasks = load_dataset(data)
    elif data.name == REASONING_GYM:
        tasks = load_reasoning_gym(data, seed)
    elif data.name in GENERATED:
        tasks = generate(
            data.name,
            data.options,
            seed=seed,
            train_size=data.train_size or GENERATED_TRAIN,
            validation_size=data.val_size or GENERATED_VALIDATION,
        )
    else:
        raise unknown("task", data.name, [*GENERATED, *DATASETS, REASONING_GYM])
    return with_system_prompt(tasks, data.system_prompt)


def with_system_prompt(tasks: TaskSet, prompt: str | None) -> TaskSet:
    """Put `data.system_prompt` before every task that has no system message of its own."""
    if prompt is None:
        return tasks
    train, validation = prepend_system(tasks.train, prompt), prepend_system(tasks.validation, prompt)
    warnings = tasks.warnings
    if train == tasks.train and validation == tasks.validation:
        warnings += ("data.system_prompt is not used: every task brings a system message of its own",)
    return replace(tasks, train=train, validation=validation, warnings=warnings)


def _from_files(data: DataConfig) -> TaskSet:
    warnings: list[str] = []
    train, validation = read_splits(data, read_tasks, "tasks", warnings)
    questions = {_question(task) for task in train}
    if leaked := [task for task in validation if _question(task) in questions]:
        warnings.append(
            f"{len(leaked)} of {len(validation)} validation tasks ask a question that is trained on, "
            f"the first is {leaked[0].id}"
        )
    parts = [
        f"{len(tasks)} {split} tasks from {_listed(files)}"
        for split, tasks, files in (
            ("training", train, data.train_files),
            ("validation", validation, data.val_files),
        )
        if tasks
    ]
    return TaskSet(train, validation, default_reward(data, (*train, *validation)), ", ".join(parts), tuple(warnings))


def _listed(files: object) -> str:
    paths = find_files("data", files)
    return str(paths[0]) if len(paths) == 1 else f"{len(paths)} files"


def _question(task: Task) -> str:
    """The last message's text with normalized white space, for comparing tasks."""
    return " ".join(str(task.messages[-1]["content"]).split())


def nothing_to_train_on(data: DataConfig) -> InputError:
    if data.train_files is None and data.val_files is None:
        can_split = data.name in DATASETS and "held_out" in DATASETS[data.name].option_names
        split = "data.options.held_out=100 evaluates on 100 of its tasks and trains on the others; or "
        return InputError(
            f"data={data.name} is for evaluation: there is nothing in it to train on\n"
            f"  fix: {split if can_split else ''}covey eval MODEL data={data.name}, or train on another set"
        )
    return InputError("there is nothing to train on: data.val_files is given without data.train_files")


# -- The default reward ------------------------------------------------------------------------------------------------


def default_reward(data: DataConfig, tasks: Sequence[Task] = ()) -> str | None:
    """The reward if the user names none: that of the data set or generated task, also for files that replace it, as on
    top of a recipe. Files without a `data.name` are scored by what their answers look like."""
    files = data.train_files is not None or data.val_files is not None
    if files and data.name == DataConfig().name:
        return reward_by_answers(tasks)
    if data.name == REASONING_GYM:
        return REASONING_GYM
    if data.name in DATASETS:
        return DATASETS[data.name].reward
    return make(data.name, data.options).reward if data.name in GENERATED else None


def reward_by_answers(tasks: Sequence[Task]) -> str | None:
    """The mathematical reward if most answers end in `#### N` or `\\boxed{…}`: compared as text, a reply would have to
    repeat the whole worked solution."""
    answers = [task.answer for task in tasks if task.answer is not None]
    marked = sum(isinstance(answer, str) and MARKED.search(answer) is not None for answer in answers)
    return MATHEMATICAL if 2 * marked > len(answers) else None


# -- A single question from the user -----------------------------------------------------------------------------------

QUESTION = "question"  # the id of such a task


def plain_question(question: str, data: DataConfig) -> Task:
    """A task with the question alone, and data.system_prompt."""
    return _single_task(({"role": "user", "content": question},), data)


def ask_like_tasks(question: str, data: DataConfig, seed: int) -> Task:
    """A task with the question and the same system prompt and worked examples as the run's tasks."""
    if data.train_files is None and data.val_files is None and data.name in DATASETS:
        return _single_task(question_messages(DATASETS[data.name], question, data.options), data)
    tasks = load_tasks(data, seed)
    context = shared_context([*tasks.train, *tasks.validation])
    return Task(QUESTION, (*context, {"role": "user", "content": question}))


def shared_context(tasks: Sequence[Task]) -> tuple[Mapping[str, Any], ...]:
    """The messages that all tasks start with, before the question: a system prompt, worked examples."""
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


def _single_task(messages: Sequence[Mapping[str, Any]], data: DataConfig) -> Task:
    tasks = TaskSet((), (Task(QUESTION, tuple(messages)),), reward=None, description=QUESTION)
    return with_system_prompt(tasks, data.system_prompt).validation[0]


# -- Order -------------------------------------------------------------------------------------------------------------


def steps_per_epoch(tasks: int, batch_size: int) -> int:
    """The number of batches in an epoch. An incomplete last batch is dropped, unless it is the only one."""
    if tasks < 1:
        raise InputError("there are no training tasks\n  fix: give data.train_files, or a generated task as data.name")
    return max(1, tasks // batch_size)


def batch_for_step(
    tasks: Sequence[Item], step: int, batch_size: int, *, seed: int, shuffle: bool
) -> tuple[int, list[Item]]:
    """The epoch of a step (from 0), and its tasks or demonstrations. No batch mixes two epochs."""
    epoch, index = divmod(step, steps_per_epoch(len(tasks), batch_size))
    order = list(range(len(tasks)))
    if shuffle:
        stream("order", seed, epoch).shuffle(order)
    return epoch, [tasks[i] for i in order[index * batch_size : (index + 1) * batch_size]]


def fresh_tasks(
    tasks: Sequence[Task], step: int, round: int, count: int, *, seed: int, tried: Collection[str]
) -> list[Task]:
    """Up to `count` tasks that this step has not tried yet, to replace some without a learning signal."""
    order = [task for task in tasks if task.id not in tried]
    stream("fresh", seed, step, round).shuffle(order)
    return order[:count]
