"""From episodes to token rows and mini-batches."""

from __future__ import annotations

import pytest
import torch

from covey.protocols import Advantages
from covey.training.samples import episode_rows, minibatches, to_samples
from covey.types import Collected, Episode, Group, StopReason, Task, Turn


def turn(prompt: list[int], completion: list[int]) -> Turn:
    n = len(completion)
    return Turn(tuple(prompt), tuple(completion), tuple(-0.1 * t for t in completion), (3,) * n, StopReason.EOS)


def episode(*turns: Turn, reward: float | None = 1.0, task: str = "t") -> Episode:
    return Episode(Task(task, ()), turns, (), {"score": reward})


def test_a_turn_that_continues_the_last_joins_its_row() -> None:
    (row,) = episode_rows(episode(turn([1, 2], [5, 6]), turn([1, 2, 5, 6, 9, 9], [7])), index=4)
    assert row.prompt_ids == (1, 2)
    assert row.response_ids == (5, 6, 9, 9, 7)
    assert row.mask == (True, True, False, False, True)
    assert row.logprobs == pytest.approx((-0.5, -0.6, 0.0, 0.0, -0.7))
    assert row.versions == (3, 3, -1, -1, 3)
    assert row.episode == 4


def test_a_rewritten_history_forks_into_a_new_row_of_the_same_episode() -> None:
    rows = episode_rows(episode(turn([1, 2], [5, 6]), turn([1, 2, 5, 9], [7])), index=0)
    assert [row.prompt_ids for row in rows] == [(1, 2), (1, 2, 5, 9)]
    assert [row.episode for row in rows] == [0, 0]


def groups() -> Collected:
    made = []
    for number in range(3):
        task = Task(f"t{number}", ())
        one = episode(turn([1, number], [5] * (number + 1)), reward=float(number))
        forked = episode(turn([1, number], [6]), turn([2], [7, 7]), reward=None)
        made.append(Group(task, (one, forked)))
    return Collected(tuple(made))


def test_columns_of_a_step() -> None:
    samples = to_samples(groups(), {"score": 2.0}, temperature=0.5)
    assert samples.group_N.tolist() == [0, 0, 1, 1, 2, 2]
    assert samples.episode_R.tolist() == [0, 1, 1, 2, 3, 3, 4, 5, 5]
    assert samples.mask_RT.sum(-1).tolist() == [1, 1, 2, 2, 1, 2, 3, 1, 2]
    assert samples.total_reward().tolist() == [0, 0, 2, 0, 4, 0]  # a missing reward counts as 0
    assert samples.rewards["score"].isnan().tolist() == [False, True] * 3


def test_mini_batches_hold_whole_groups_and_all_rows_of_their_episodes() -> None:
    samples = to_samples(groups(), {"score": 1.0}, temperature=1.0)
    advantages = Advantages(torch.arange(6.0))
    batches = list(minibatches(samples, advantages, groups_per_batch=2, epochs=2))
    assert [b.groups for b in batches] == [2, 1, 2, 1]
    assert [b.epoch for b in batches] == [0, 0, 1, 1]
    first, second = batches[:2]
    assert first.group_N.tolist() == [0, 0, 1, 1]
    assert first.row_R.tolist() == [0, 1, 2, 3, 4, 5]
    assert second.group_N.tolist() == [0, 0]
    assert second.episode_R.tolist() == [0, 1, 1]
    assert second.row_R.tolist() == [6, 7, 8]
    assert second.length_N.tolist() == [3, 3]
    assert second.advantages_RT[:, 0].tolist() == [4, 5, 5]
    torch.testing.assert_close(second.old_sum_N, torch.tensor([-1.5, -2.0]))


def test_token_level_advantages_pass_through() -> None:
    samples = to_samples(groups(), {"score": 1.0}, temperature=1.0)
    per_token = torch.rand(samples.mask_RT.shape)
    (batch,) = minibatches(samples, Advantages(per_token, returns=per_token * 2), groups_per_batch=None, epochs=1)
    torch.testing.assert_close(batch.advantages_RT, per_token)
    assert batch.returns_RT is not None
    torch.testing.assert_close(batch.returns_RT, per_token * 2)
