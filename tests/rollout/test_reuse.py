"""Groups that are learned from more than once."""

from __future__ import annotations

from collections import Counter

import pytest

from covey.rollout.asynchronous import Reuse, fresh_groups, oldest
from covey.types import Episode, Group, StopReason, Task, Turn


def group(number: int, *versions: int) -> Group:
    task = Task(str(number), ({"role": "user", "content": "?"},))
    turn = Turn((1,), (2,) * len(versions), (0.0,) * len(versions), versions, StopReason.EOS)
    return Group(task, (Episode(task, (turn,), task.messages),))


def test_the_share_of_new_groups() -> None:
    assert [fresh_groups(8, uses) for uses in (1, 2, 3, 8, 9)] == [8, 4, 3, 1, 1]


def test_the_age_of_a_group_is_that_of_its_oldest_token() -> None:
    assert oldest(group(0, 7, 5, 6)) == 5


@pytest.mark.parametrize(("uses", "lead"), [(2, 1), (3, 2), (4, 9)])
def test_a_group_is_used_so_often_at_most_and_never_too_old(uses: int, lead: int) -> None:
    reuse, used = Reuse(12, uses, lead, seed=0), Counter[str]()
    for step in range(200):
        former = reuse.draw(step)
        fresh = [(step * reuse.fresh + n, group(step * reuse.fresh + n, step)) for n in range(reuse.fresh)]
        reuse.add(fresh)
        assert len({g.task.id for g in former}) == len(former) <= reuse.drawn
        assert all(step - oldest(g) <= lead for g in former)
        if step >= uses:
            assert len(former) == reuse.drawn
        used.update(g.task.id for g in [*former, *(g for _, g in fresh)])
    assert set(used.values()) <= set(range(1, uses + 1)) and max(used.values()) == uses
    assert len(reuse.kept) <= reuse.fresh * (lead + 1)


def test_the_draw_is_named_by_seed_and_step() -> None:
    def drawn(seed: int, step: int) -> list[str]:
        reuse = Reuse(8, 2, 99, seed)
        reuse.add((n, group(n, 0)) for n in range(40))
        return [g.task.id for g in reuse.draw(step)]

    assert drawn(0, 5) == drawn(0, 5) != drawn(0, 6)
    assert drawn(1, 5) != drawn(0, 5)
