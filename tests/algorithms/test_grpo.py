"""GRPO's advantage and Dr. GRPO's, by hand."""

from __future__ import annotations

import pytest
import torch

from covey.algorithms.functional import advantages
from tests.algorithms.helpers import F64, all_groups, expected_gradient, same, tensor, true_gradient


def test_one_of_four() -> None:
    # R̄ = ¼, unbiased std = ½: (1 − ¼)/½ = 1.5
    same(advantages("grpo", tensor(1, 0, 0, 0), [0] * 4), [1.5, -0.5, -0.5, -0.5], 1e-5)


def test_epsilon_is_added_to_the_standard_deviation() -> None:
    same(advantages("grpo", tensor(1, 0, 0, 0), [0] * 4, epsilon=0.25), [1, -1 / 3, -1 / 3, -1 / 3])


def test_without_std_it_is_dr_grpo() -> None:
    expected = [0.75, -0.25, -0.25, -0.25]
    same(advantages("grpo", tensor(1, 0, 0, 0), [0] * 4, std_normalize=False), expected)
    same(advantages("dr_grpo", tensor(1, 0, 0, 0), [0] * 4), expected)


def test_a_group_of_one_has_advantage_zero() -> None:
    for name in ("grpo", "dr_grpo"):
        with pytest.warns(UserWarning, match="1 groups have a single answer"):
            found = advantages(name, tensor(3, 1, 0), ["alone", "pair", "pair"])
        assert found[0] == 0 and found[1] > 0 > found[2]


def test_changing_the_rewards_scale_and_origin_changes_nothing() -> None:
    torch.manual_seed(0)
    rewards, groups = torch.rand(12, dtype=F64), torch.arange(12) % 3
    before = advantages("grpo", rewards, groups, epsilon=1e-12)
    same(advantages("grpo", 7 * rewards - 3, groups, epsilon=1e-12), before, 1e-9)
    same(advantages("grpo", -rewards, groups, epsilon=1e-12), -before, 1e-9)


def test_dr_grpo_is_unbiased_up_to_its_own_sample_in_the_mean() -> None:
    """Enumerating all groups of 3: E[mean A ∇ log π] = (k − 1)/k · ∇ E[R]; dividing by σ breaks that."""
    logits, rewards = tensor(0.3, -0.5, 0.9), tensor(1.0, 0.2, -0.4)
    action, group = all_groups(3, 3)
    found = advantages("dr_grpo", rewards[action], group)
    true = true_gradient(logits, rewards)
    same(expected_gradient(logits, found, action, group), 2 / 3 * true)
    direction = expected_gradient(logits, advantages("grpo", rewards[action], group), action, group)
    assert float(torch.cosine_similarity(direction, true, dim=0)) < 1 - 1e-4
