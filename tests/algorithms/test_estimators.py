"""Estimators of one advantage per answer: numbers by hand, unbiasedness by enumeration, and what holds for all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from covey.algorithms import make
from covey.algorithms.functional import advantages
from tests.algorithms.helpers import (
    F64,
    GROUP_ESTIMATORS,
    all_groups,
    expected_gradient,
    same,
    samples_of,
    tensor,
    true_gradient,
)

LOGITS = tensor(0.3, -0.5, 0.9)
REWARDS = tensor(1.0, 0.2, -0.4)


# Numbers by hand.


def test_rloo_compares_with_the_others() -> None:
    same(advantages("rloo", tensor(1, 0, 0, 0), [0] * 4), [1, -1 / 3, -1 / 3, -1 / 3])
    # others' means of 1, 4, 7: 5.5, 4, 2.5; in a group of two, each is the other's
    same(advantages("rloo", tensor(1, 4, 7, 2, 3), [0, 0, 0, 1, 1]), [-4.5, 0, 4.5, -1, 1])


def test_remax_compares_with_the_greedy_answer() -> None:
    greedy = tensor(0.5, 0.5, 2.0)
    same(advantages("remax", tensor(1, 0, 3), ["x", "x", "y"], baseline_rewards=greedy), [0.5, -0.5, 1])
    samples = samples_of([1, 0, 3], [0, 0, 1], baseline_rewards_G=tensor(0.5, 2.0))
    assert make("remax").advantages(samples).metrics["remax/greedy_reward"] == 1.25


def test_remax_without_a_greedy_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="remax needs baseline_rewards="):
        advantages("remax", tensor(1, 0), [0, 0])


def test_opo_weighs_the_baseline_by_length() -> None:
    # lengths 1, 3 and rewards 1, 0: b = 1·1/4; second group: lengths 2, 2: b = the mean
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 0]])
    same(advantages("opo", tensor(1, 0, 4, 2), [0, 0, 1, 1], mask=mask), [0.75, -0.25, 1, -1])


def test_opo_counts_the_tokens_of_all_rows() -> None:
    samples = samples_of([1.0, 0.0], [0, 0], mask=[[1, 1, 0], [1, 0, 1], [1, 0, 0]], episode=[0, 1, 0])
    # lengths 3 and 2: b = 3/5
    same(make("opo").advantages(samples).values, [0.4, -0.6])


def test_gpg_makes_up_for_answers_without_reward() -> None:
    # 6 answers, 2 with a reward: α = 3; group means ½ and 0 and 1, one answer alone
    samples = samples_of([1, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 2])
    found = make("gpg").advantages(samples)
    same(found.values, [1.5, -1.5, 0, 0, 0, 0])
    assert found.metrics == {"gpg/alpha": 3.0}
    assert make("gpg").advantages(samples_of([0, 0], [0, 0])).metrics == {"gpg/alpha": 2.0}


def test_passk_reinforces_the_best_by_what_it_adds_to_the_second() -> None:
    # 1, 3, 6, 2: variance (4 + 0 + 9 + 1)/3
    std = (14 / 3) ** 0.5
    same(advantages("grpo_passk", tensor(1, 3, 6, 2), [0] * 4, epsilon=0.5), [0, 0, 3 / (std + 0.5), 0])
    same(advantages("grpo_passk", tensor(1, 3, 6, 2), [0] * 4, std_normalize=False), [0, 0, 3, 0])
    same(advantages("grpo_passk", tensor(6, 3, 6, 2), [0] * 4), [0, 0, 0, 0])  # a second solution is worth nothing


def test_passk_finds_every_group_wherever_its_answers_lie() -> None:
    found = advantages("grpo_passk", tensor(1, 0, 5, 2), ["a", "b", "b", "a"], std_normalize=False)
    same(found, [0, 0, 5, 1])


def test_reinforce_baseline_whitens_over_tokens() -> None:
    # R − R̄ = ±1 with 3 tokens and 1: mean ½, variance (3·¼ + 9/4)/3 = 1
    mask = torch.tensor([[1, 1, 1], [0, 1, 0]])
    same(advantages("reinforce_plus_plus_baseline", tensor(2, 0), [0, 0], mask=mask), [0.5, -1.5], 1e-7)


# Theory: a three-action softmax bandit, every group of three enumerated.


@pytest.mark.parametrize("size", [2, 3])
def test_rloo_is_unbiased(size: int) -> None:
    action, group = all_groups(3, size)
    found = advantages("rloo", REWARDS[action], group)
    same(expected_gradient(LOGITS, found, action, group), true_gradient(LOGITS, REWARDS))


def test_remax_is_unbiased_and_the_greedy_answer_is_its_baseline() -> None:
    action, group = all_groups(3, 1)
    greedy = REWARDS[LOGITS.argmax()].expand(len(action))
    found = advantages("remax", REWARDS[action], group, baseline_rewards=greedy)
    same(found, REWARDS + 0.4)
    same(expected_gradient(LOGITS, found, action, group), true_gradient(LOGITS, REWARDS))


def test_opo_of_equal_lengths_has_its_own_sample_in_the_baseline() -> None:
    """So that E is (k − 1)/k of the true gradient, as for any mean over the group."""
    action, group = all_groups(3, 3)
    found = advantages("opo", REWARDS[action], group, mask=torch.ones(len(action), 2))
    same(expected_gradient(LOGITS, found, action, group), 2 / 3 * true_gradient(LOGITS, REWARDS))


def test_gpg_is_the_centred_gradient_times_alpha() -> None:
    action, group = all_groups(3, 2)
    found = advantages("gpg", REWARDS[action], group)  # no reward is 0: α = 1
    same(expected_gradient(LOGITS, found, action, group), 1 / 2 * true_gradient(LOGITS, REWARDS))


# What holds for all.


def quietly(name: str, rewards: torch.Tensor, groups: Any, **options: Any) -> torch.Tensor:
    """Groups of one are warned about; `test_functional.py` looks at that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return advantages(name, rewards, groups, **options)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_equal_rewards_have_no_advantage_at_all(name: str, dtype: torch.dtype) -> None:
    """Also where rounding makes the mean of equal numbers another number: groups of 3, 7 and 2."""
    groups = [0] * 3 + [1] * 7 + [2] * 2
    mask = torch.arange(4) <= (torch.arange(12) % 4)[:, None]  # answers of 1 to 4 tokens
    for value in (0.1, 0.3, 1e6, -7.7):
        assert advantages(name, torch.full((12,), value, dtype=dtype), groups, mask=mask).tolist() == [0.0] * 12


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_difference_within_rounding_is_no_signal(name: str) -> None:
    """The next number after 0.3 is the same reward, also for estimators that divide by a spread."""
    rewards = torch.full((4,), 0.3)
    rewards[0] = torch.nextafter(rewards[0], torch.ones(()))
    assert float(advantages(name, rewards, [0] * 4).abs().max()) < 1e-6


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_an_answer_alone_has_no_advantage(name: str) -> None:
    found = quietly(name, tensor(5.0, 1.0, 0.0), ["alone", "pair", "pair"])
    same(found[0], 0.0)
    assert found[1] > 0 >= found[2]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_the_order_of_the_answers_does_not_matter(name: str) -> None:
    torch.manual_seed(1)
    rewards, groups = torch.rand(12, dtype=F64), torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3])
    mask = torch.rand(12, 6) < 0.7
    mask[:, 0] = True
    before = quietly(name, rewards, groups, mask=mask)
    for _ in range(5):
        order = torch.randperm(12)
        same(quietly(name, rewards[order], groups[order], mask=mask[order]), before[order])


@pytest.mark.parametrize("name", [n for n in GROUP_ESTIMATORS if n not in ("gpg", "grpo_passk", "maxrl")])
def test_a_constant_added_to_all_rewards_of_a_group_changes_nothing(name: str) -> None:
    torch.manual_seed(2)
    rewards, groups = torch.rand(9, dtype=F64), torch.arange(9) // 3
    before = advantages(name, rewards, groups)
    same(advantages(name, rewards + tensor(0.5, -2.0, 4.0)[groups], groups), before, 1e-9)


@pytest.mark.parametrize("name", [n for n in GROUP_ESTIMATORS if n not in ("opo", "grpo_passk")])
def test_advantages_of_a_group_sum_to_zero(name: str) -> None:
    torch.manual_seed(3)
    rewards, groups = torch.rand(9, dtype=F64), torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2])
    found = advantages(name, rewards, groups)
    same(torch.zeros(3, dtype=F64).index_add(0, groups, found), [0, 0, 0])


@pytest.mark.parametrize("name", [n for n in GROUP_ESTIMATORS if n not in ("gdpo", "dgdo")])
def test_named_rewards_add_up_with_weights_and_a_missing_one_adds_nothing(name: str) -> None:
    rewards = {"right": tensor(1.0, 0.0, 0.0), "short": tensor(float("nan"), 1.0, 0.5)}
    found = advantages(name, rewards, [0, 0, 0], weights={"short": 0.5})
    same(found, advantages(name, tensor(1.0, 0.5, 0.25), [0, 0, 0]))


@pytest.mark.parametrize("name", [n for n in GROUP_ESTIMATORS if n not in ("gdpo", "dgdo")])
def test_token_rewards_are_summed_under_the_mask(name: str) -> None:
    per_token, mask = tensor([1, 2, 9], [0, 1, 1]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    same(advantages(name, per_token, [0, 0], mask=mask), advantages(name, tensor(3, 2), [0, 0], mask=mask))
