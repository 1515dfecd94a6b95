"""Which tasks a step trains on. The order of an epoch depends on (seed, epoch) alone, so a resumed run finds the batch
of any step without replaying the steps before it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

from covey.errors import InputError
from covey.tasks.seeds import stream
from covey.types import Task

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
