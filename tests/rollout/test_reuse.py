"""Groups that are learned from more than once."""

from __future__ import annotations

from collections import Counter

import pytest

from covey.rollout.asynchronous import ReplayBuffer, fresh_groups, oldest_version
from covey.types import Episode, Group, StopReason, Task, Turn


def group(number: int, *versions: int) -> Group:
    task = Task(str(number), ({"role": "user", "content": "?"},))
    turn = Turn((1,), (2,) * len(versions), (0.0,) * len(versions), versions, StopReason.EOS)
    return Group(task, (Episode(task, (turn,), task.messages),))


def test_the_share_of_new_groups() -> None:
    assert [fresh_groups(8, uses) for uses in (1, 2, 3, 8, 9)] == [8, 4, 3, 1, 1]


def test_the_age_of_a_group_is_that_of_its_oldest_token() -> None:
    assert oldest_version(group(0, 7, 5, 6)) == 5


@pytest.mark.parametrize(("uses", "lead"), [(2, 1), (3, 2), (4, 9)])
def test_a_group_is_used_so_often_at_most_and_never_too_old(uses: int, lead: int) -> None:
    replay, used = ReplayBuffer(12, uses, lead, seed=0), Counter[str]()
    for step in range(200):
        former = replay.draw(step)
        fresh = [(step * replay.fresh + n, group(step * replay.fresh + n, step)) for n in range(replay.fresh)]
        replay.add(fresh)
        assert len({g.task.id for g in former}) == len(former) <= replay.drawn
        assert all(step - oldest_version(g) <= lead for g in former)
        if step >= uses:
            assert len(former) == replay.drawn
        used.update(g.task.id for g in [*former, *(g for _, g in fresh)])
    assert set(used.values()) <= set(range(1, uses + 1)) and max(used.values()) == uses
    assert len(replay.groups) <= replay.fresh * (lead + 1)


def test_the_draw_is_named_by_seed_and_step() -> None:
    def drawn(seed: int, step: int) -> list[str]:
        replay = ReplayBuffer(8, 2, 99, seed)
        replay.add((n, group(n, 0)) for n in range(40))
        return [g.task.id for g in replay.draw(step)]

    assert drawn(0, 5) == drawn(0, 5) != drawn(0, 6)
    assert drawn(1, 5) != drawn(0, 5)
