"""Overlong and truncated answers: DAPO's soft penalty, masking and penalising."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from covey.algorithms import make
from covey.algorithms.shaping import GroupFilter, Shaping, overlong
from covey.types import Samples, Unfiltered
from tests.algorithms.helpers import same, samples_of


def long_step(*lengths: int, max_tokens: int = 100, **columns: Any) -> Samples:
    """One group of answers of these lengths, all with reward 1."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return samples_of([1.0] * len(lengths), [0] * len(lengths), mask=mask.tolist(), max_tokens=max_tokens, **columns)


@pytest.mark.parametrize(
    ("length", "expected"), [(50, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (110, -1.0)]
)
def test_the_soft_penalty_by_hand(length: int, expected: float) -> None:
    assert float(overlong(torch.tensor([length]), 100, 20)[0]) == pytest.approx(expected)
    assert float(overlong(torch.tensor([length]), 100, 20, penalty=3.0)[0]) == pytest.approx(3 * expected)


@pytest.mark.parametrize("buffer", [20.0, 0.2])
def test_the_buffer_is_a_number_of_tokens_or_a_share(buffer: float) -> None:
    samples = shaped_by(Shaping(overlong_buffer=buffer), long_step(50, 90, 110))
    same(samples.rewards["overlong"], [0.0, -0.5, -1.0])
    same(samples.total_reward(), [1.0, 0.5, 0.0])
    samples = shaped_by(Shaping(overlong_buffer=buffer, overlong_penalty=0.5), long_step(50, 90, 110))
    same(samples.total_reward(), [1.0, 0.75, 0.5])


def test_the_penalty_is_a_separate_reward() -> None:
    """So that GDPO normalises it by itself: correct 1, 0, 1 and overlong 0, −½, −1."""
    algorithm = make("gdpo", overlong_buffer=20)
    samples, _ = algorithm.shape(
        samples_of(
            {"correct": [1.0, 0.0, 1.0]},
            [0, 0, 0],
            mask=(torch.arange(110) < torch.tensor([50, 90, 110])[:, None]).tolist(),
            weights={"correct": 2.0},
            max_tokens=100,
        )
    )
    assert dict(samples.weights) == {"correct": 2.0, "overlong": 1.0}
    by_hand = make("gdpo").advantages(
        samples_of({"c": [1.0, 0.0, 1.0], "o": [0.0, -0.5, -1.0]}, [0, 0, 0], weights={"c": 2.0})
    )
    same(algorithm.advantages(samples).values, by_hand.values)


def shaped_by(shaping: Shaping, samples: Samples) -> Samples:
    return shaping.mask(shaping.reward(samples))


def cut_step() -> Samples:
    return long_step(3, 2, 3, max_tokens=3, truncated_N=torch.tensor([True, False, True]))


def test_truncated_answers_are_kept_by_default() -> None:
    samples = cut_step()
    assert shaped_by(Shaping(), samples) is samples


def test_truncated_answers_can_be_masked() -> None:
    """They count in the group's statistics and not in the loss."""
    samples = shaped_by(Shaping(truncated="mask"), cut_step())
    assert samples.mask_RT.tolist() == [[False] * 3, [True, True, False], [False] * 3]
    same(samples.total_reward(), [1.0, 1.0, 1.0])


def test_truncated_answers_can_be_penalised() -> None:
    samples = shaped_by(Shaping(truncated="penalise"), cut_step())
    same(samples.rewards["truncated"], [-1.0, 0.0, -1.0])
    same(samples.total_reward(), [0.0, 1.0, 0.0])
    assert bool(samples.mask_RT[0].all())


def test_a_masked_row_masks_all_rows_of_its_episode() -> None:
    samples = samples_of(
        [1.0, 1.0], [0, 0], mask=[[1], [1], [1]], episode=[1, 0, 1], truncated_N=torch.tensor([False, True])
    )
    shaped = shaped_by(Shaping(truncated="mask"), samples)
    assert shaped.mask_RT.tolist() == [[False], [True], [False]]


def test_lengths_count_though_the_answer_is_masked() -> None:
    """Both at once: the truncated answer is penalised in the group's statistics."""
    samples = shaped_by(Shaping(overlong_buffer=1.0, truncated="mask"), cut_step())
    same(samples.rewards["overlong"], [-1.0, 0.0, -1.0])


@pytest.mark.parametrize(
    ("name", "options"), [("overlong", {"overlong_buffer": 0.5}), ("truncated", {"truncated": "penalise"})]
)
def test_a_reward_of_the_same_name_is_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"the algorithm adds a reward called '{name}'"):
        make("grpo", **options).check_rewards({"right": 1.0, name: 0.0})
    make("grpo", **options).check_rewards({"right": 1.0})
    make("grpo").check_rewards({"right": 1.0, name: 0.0})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlong_buffer": -1.0}, "overlong_buffer must be a number from 0"),
        ({"overlong_penalty": -1.0}, "overlong_penalty must be a number from 0"),
        ({"truncated": "drop"}, "truncated must be keep, mask or penalise"),
        ({"max_refills": -1}, "max_refills must be a whole number from 0"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("grpo", **options)


def test_a_masked_answer_pays_its_kl_like_the_others() -> None:
    """Equal rewards and equal KLs make equal totals: no answer gains from being cut off."""
    algorithm = make("rloo", truncated="mask", kl_coef=0.5, kl_in="reward")
    zeros = torch.zeros(2, 1, dtype=torch.float64)
    samples = samples_of(
        [0.0, 0.0], [0, 0], truncated_N=torch.tensor([True, False]), old_logprobs_RT=zeros, ref_logprobs_RT=zeros - 2
    )
    shaped, metrics = algorithm.shape(samples)
    same(shaped.total_reward(), [-1.0, -1.0])
    assert metrics["kl/reward"] == -1.0 and metrics["kl/samples"] == 2.0
    assert shaped.mask_RT.tolist() == [[False], [True]]


def test_the_overlong_cost_is_that_of_the_longest_turn() -> None:
    """Three turns of two tokens each, of at most four: none is too long."""
    samples = samples_of([1.0], [0], mask=[[1] * 6], max_tokens=4, longest_N=torch.tensor([2]))
    same(shaped_by(Shaping(overlong_buffer=1.0), samples).rewards["overlong"], [0.0])


def test_filtered_groups_have_the_algorithms_own_rewards_too() -> None:
    unfiltered = Unfiltered(
        group_N=torch.tensor([0, 0, 1, 1]),
        rewards={"reward": torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)},
        longest_N=torch.tensor([1, 1, 4, 4]),
        truncated_N=torch.tensor([False, False, True, True]),
    )
    samples = samples_of([1.0, 0.0], [0, 0], max_tokens=4, unfiltered=unfiltered)
    shaped = shaped_by(Shaping(overlong_buffer=2.0, truncated="penalise"), samples)
    same(shaped.unfiltered_reward("truncated")[0], [0.0, 0.0, -1.0, -1.0])
    same(shaped.unfiltered_reward("overlong")[0], [0.0, 0.0, -1.0, -1.0])
    assert shaped.unfiltered_reward("overlong")[1].tolist() == [0, 0, 1, 1]


def test_dynamic_sampling_is_off_but_for_dapo() -> None:
    assert make("grpo").filter == GroupFilter(filter_groups=False, filter_metric=None, max_refills=3)
    assert make("dapo").filter.filter_groups
