"""A question of the user's own, asked as the tasks of a run are: with their system prompt and worked examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from covey.config.schema import DataConfig
from covey.tasks.datasets import DATASETS
from covey.tasks.datasets.load import question_messages
from covey.tasks.load import load_tasks, with_system_prompt
from covey.tasks.taskset import TaskSet
from covey.types import Task

QUESTION = "question"  # the id of such a task


def plain_question(question: str, data: DataConfig) -> Task:
    """The question and nothing else but data.system_prompt."""
    return _prompted(({"role": "user", "content": question},), data)


def ask_like_tasks(question: str, data: DataConfig, seed: int) -> Task:
    """The messages that training would give a task with this question."""
    if data.train_files is None and data.val_files is None and data.name in DATASETS:
        return _prompted(question_messages(DATASETS[data.name], question, data.options), data)
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


def _prompted(messages: Sequence[Mapping[str, Any]], data: DataConfig) -> Task:
    alone = TaskSet((), (Task(QUESTION, tuple(messages)),), reward=None, description=QUESTION)
    return with_system_prompt(alone, data.system_prompt).validation[0]
