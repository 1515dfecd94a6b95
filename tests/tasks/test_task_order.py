"""Batches: every epoch is a permutation, and any step's batch can be had without the steps before it."""

from __future__ import annotations

import pytest

from covey.errors import InputError
from covey.tasks import batch_for_step, steps_per_epoch
from covey.types import Task

SIZES = [(1, 1), (1, 4), (3, 4), (4, 4), (5, 4), (8, 4), (11, 4), (12, 1)]


def tasks(count: int) -> list[Task]:
    return [Task(str(i), ()) for i in range(count)]


def ids(count: int, step: int, size: int, seed: int = 0, shuffle: bool = True) -> list[str]:
    return [task.id for task in batch_for_step(tasks(count), step, size, seed=seed, shuffle=shuffle)[1]]


@pytest.mark.parametrize(("count", "size", "expected"), [(1, 4, 1), (4, 4, 1), (7, 4, 1), (8, 4, 2), (11, 4, 2)])
def test_steps_per_epoch(count: int, size: int, expected: int) -> None:
    assert steps_per_epoch(count, size) == expected


def test_without_shuffling_tasks_come_in_order_and_the_short_rest_is_dropped() -> None:
    batches = [batch_for_step(tasks(5), step, 2, seed=0, shuffle=False) for step in range(4)]
    assert [(epoch, [task.id for task in batch]) for epoch, batch in batches] == [
        (0, ["0", "1"]),
        (0, ["2", "3"]),
        (1, ["0", "1"]),
        (1, ["2", "3"]),
    ]


def test_a_short_batch_is_kept_if_it_is_the_only_one() -> None:
    assert sorted(ids(3, step=5, size=4)) == ["0", "1", "2"]


@pytest.mark.parametrize(("count", "size"), SIZES)
@pytest.mark.parametrize("seed", [0, 1, 17])
def test_an_epoch_repeats_no_task_and_leaves_out_only_the_rest(count: int, size: int, seed: int) -> None:
    steps = steps_per_epoch(count, size)
    for epoch in range(3):
        batches = [batch_for_step(tasks(count), epoch * steps + k, size, seed=seed, shuffle=True) for k in range(steps)]
        seen = [task.id for _, batch in batches for task in batch]
        assert {found for found, _ in batches} == {epoch}
        assert len(seen) == len(set(seen)) == (count if count < size else count - count % size)


def test_order_depends_on_seed_and_epoch_alone() -> None:
    assert ids(50, step=0, size=50) == ids(50, step=0, size=50)
    assert ids(50, step=0, size=50) == ids(50, step=0, size=25) + ids(50, step=1, size=25)
    assert ids(50, step=0, size=50) != ids(50, step=1, size=50)
    assert ids(50, step=0, size=50) != ids(50, step=0, size=50, seed=1)


def test_every_task_is_equally_likely_to_come_first() -> None:
    firsts = [ids(4, step=epoch, size=4)[0] for epoch in range(4000)]
    # 1000 each, standard deviation √(4000 · ¼ · ¾) ≈ 27
    assert all(abs(firsts.count(str(i)) - 1000) < 5 * 27 for i in range(4))


def test_no_tasks() -> None:
    with pytest.raises(InputError, match="there are no training tasks"):
        batch_for_step([], 0, 4, seed=0, shuffle=True)
