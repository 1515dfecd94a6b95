"""GRPO's advantage and PPO's clipped loss: numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch

from covey.algorithms import make
from covey.algorithms.functional import advantages, policy_loss
from covey.algorithms.ops import effective_sample_size, kl_penalty


def test_one_of_four() -> None:
    # R̄ = ¼, unbiased std = ½: (1 − ¼)/½ = 1.5
    found = advantages("grpo", torch.tensor([1.0, 0.0, 0.0, 0.0]), [0] * 4)
    torch.testing.assert_close(found, torch.tensor([1.5, -0.5, -0.5, -0.5]), atol=1e-5, rtol=0)


def test_without_std_it_is_dr_grpo() -> None:
    found = advantages("grpo", torch.tensor([1.0, 0.0, 0.0, 0.0]), [0] * 4, std_normalize=False)
    torch.testing.assert_close(found, torch.tensor([0.75, -0.25, -0.25, -0.25]))


@pytest.mark.parametrize("value", [0.1, 0.3, 1e6, -7.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_rewards_have_no_advantage_at_all(value: float, dtype: torch.dtype) -> None:
    """Rounding of the mean must not be blown up by a division by ε."""
    found = advantages("grpo", torch.full((7,), value, dtype=dtype), [0] * 7)
    assert found.tolist() == [0.0] * 7


def test_a_group_of_one_has_advantage_zero() -> None:
    with pytest.warns(UserWarning, match="1 groups have a single answer"):
        found = advantages("grpo", torch.tensor([3.0, 1.0, 0.0]), ["alone", "pair", "pair"])
    assert found[0] == 0
    torch.testing.assert_close(found[1:], torch.tensor([0.7071, -0.7071]), atol=1e-4, rtol=0)


def test_order_of_the_answers_does_not_matter() -> None:
    torch.manual_seed(0)
    rewards, groups = torch.rand(12), torch.arange(12) % 3
    order = torch.randperm(12)
    torch.testing.assert_close(
        advantages("grpo", rewards, groups)[order], advantages("grpo", rewards[order], groups[order])
    )


def test_named_rewards_add_up_with_weights_and_a_missing_one_adds_nothing() -> None:
    rewards = {"right": torch.tensor([1.0, 0.0]), "short": torch.tensor([float("nan"), 1.0])}
    found = advantages("gvpo", rewards, [0, 0], weights={"short": 0.5})
    torch.testing.assert_close(found, torch.tensor([0.25, -0.25]))


def test_token_rewards_are_summed_under_the_mask() -> None:
    rewards = torch.tensor([[1.0, 2.0, 9.0], [0.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    torch.testing.assert_close(advantages("gvpo", rewards, [0, 0], mask=mask), torch.tensor([0.5, -0.5]))


def clip_loss(ratio: float, advantage: float, **options: float) -> float:
    loss, _ = policy_loss(
        "ppo_clip",
        torch.tensor([[math.log(ratio)]]),
        torch.zeros(1, 1),
        torch.tensor([advantage]),
        torch.ones(1, 1),
        **options,
    )
    return float(loss)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 1.0, -1.2),  # clipped above
        (0.5, 1.0, -0.5),  # moving away from a good answer is not clipped
        (0.5, -1.0, 0.8),  # clipped below
        (1.5, -1.0, 1.5),
        (10.0, -1.0, 3.0),  # dual clip
    ],
)
def test_clipping_by_hand(ratio: float, advantage: float, expected: float) -> None:
    assert clip_loss(ratio, advantage) == pytest.approx(expected, rel=1e-5)


def test_clip_low_and_high_are_apart() -> None:
    assert clip_loss(1.5, 1.0, clip_high=0.4) == pytest.approx(-1.4, rel=1e-5)
    assert clip_loss(0.5, -1.0, clip_low=0.3) == pytest.approx(0.7, rel=1e-5)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token-mean", -(1 * 1 + 2 * 3) / 4),
        ("seq-mean-token-sum", -(1 * 1 + 2 * 3) / 2),
        ("seq-mean-token-mean", -(1 + 2) / 2),
        ("seq-mean-token-sum-norm", -(1 * 1 + 2 * 3) / 10 / 2),
    ],
)
def test_aggregations_by_hand(how: str, expected: float) -> None:
    """Two answers of 1 and 3 tokens with advantages 1 and 2, ratio 1."""
    zeros = torch.zeros(2, 3)
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    options = {"norm_length": 10} if how.endswith("norm") else {}
    loss, _ = policy_loss("ppo_clip", zeros, zeros, torch.tensor([1.0, 2.0]), mask, aggregation=how, **options)
    assert float(loss) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "d", "expected"),
    [
        ("k3", 0.5, 0.14872),
        ("k3", -0.5, 0.10653),
        ("low_var_kl", 0.5, 0.14872),
        ("k1", 0.5, -0.5),
        ("kl", -0.5, 0.5),
        ("abs", -0.5, 0.5),
        ("k2", 0.5, 0.125),
        ("mse", -0.5, 0.125),
    ],
)
def test_kl_estimators_by_hand(name: str, d: float, expected: float) -> None:
    assert float(kl_penalty(torch.tensor(-1.0), torch.tensor(-1.0 + d), name)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_kl_estimators_are_unbiased(name: str) -> None:
    policy = torch.log_softmax(torch.tensor([0.1, 0.9, -0.4], dtype=torch.float64), -1)
    reference = torch.log_softmax(torch.tensor([1.1, 0.0, 0.3], dtype=torch.float64), -1)
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * kl_penalty(policy, reference, name)).sum(), exact)


def test_kl_in_the_loss_is_added() -> None:
    zeros, one = torch.zeros(1, 2), torch.ones(1, 2)
    reference = torch.full((1, 2), 0.5)
    loss, metrics = policy_loss(
        "grpo", zeros, zeros, torch.zeros(1), one, ref_logprobs=reference, kl_coef=0.1, kl_estimator="k3"
    )
    assert float(loss) == pytest.approx(0.014872, abs=1e-6)
    assert metrics["kl/reference"] == pytest.approx(0.14872, abs=1e-5)


def test_effective_sample_size() -> None:
    assert effective_sample_size(torch.tensor([1.0, 2.0])) == pytest.approx(0.9)
    assert effective_sample_size(torch.ones(5)) == pytest.approx(1.0)


def test_needs_follow_from_the_settings() -> None:
    assert not make("grpo").needs.reference
    assert make("grpo", kl_coef=0.01).needs.reference
    assert make("gvpo").needs.reference
    assert not make("gvpo", reference="old").needs.reference
    assert make("grpo").needs.min_group_size == make("gvpo").needs.min_group_size == 2


def test_unknown_names_are_told_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean   gvpo"):
        make("gvpoo")
    with pytest.raises(ValueError, match="did you mean   clip_high"):
        make("grpo", clip_hihg=0.1)
    with pytest.raises(ValueError, match="unknown loss"):
        policy_loss("nothing", *[torch.zeros(1, 1)] * 4)
