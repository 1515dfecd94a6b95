"""What GRPO needs to be TRL's: the spread of the whole batch, an unbiased KL gradient, recomputed log-probs."""

from __future__ import annotations

import pytest
import torch

from covey.algorithms import make
from covey.algorithms.functional import advantages, policy_loss


def test_rewards_scaled_by_the_spread_of_the_whole_batch() -> None:
    """Rewards 1, 0 | 1, 1: centred ±0.5 and 0; the standard deviation of all four (mean 3/4, n − 1) is 1/2."""
    found = advantages("grpo", torch.tensor([1.0, 0.0, 1.0, 1.0]), [0, 0, 1, 1], std_over="batch", epsilon=0.1)
    assert found.tolist() == pytest.approx([0.5 / 0.6, -0.5 / 0.6, 0, 0])
    equal = advantages("grpo", torch.ones(4), [0, 0, 1, 1], std_over="batch", epsilon=0.0)
    assert equal.tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="group or batch"):
        make("grpo", std_over="step")


def test_the_unbiased_kl_has_the_gradient_of_the_kl_itself() -> None:
    """Over all three tokens, weighed by π_old: Σ π_old · r · k3 = KL(π ‖ π_ref), value and gradient."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    old = torch.log_softmax(torch.tensor([0.1, 0.5, -0.4], dtype=torch.float64), 0)
    ref = torch.log_softmax(torch.tensor([-0.6, 0.2, 0.3], dtype=torch.float64), 0)
    new = torch.log_softmax(logits, 0)
    expected = (new.exp() * (new - ref)).sum()
    (slope,) = torch.autograd.grad(expected, logits, retain_graph=True)
    mask, none = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.float64)
    options = {"kl_coef": 1.0, "kl_unbiased": True}
    terms = [
        policy_loss(
            "ppo_clip", new[i].view(1, 1), old[i].view(1, 1), none, mask, ref_logprobs=ref[i].view(1, 1), **options
        )[0]
        for i in range(3)
    ]
    found = sum(weight * term for weight, term in zip(old.exp(), terms, strict=True))
    (found_slope,) = torch.autograd.grad(found, logits)
    assert found.item() == pytest.approx(expected.item())
    assert found_slope.tolist() == pytest.approx(slope.tolist())


def test_an_unbiased_kl_needs_sampled_tokens_in_the_loss() -> None:
    for options in ({"kl_in": "reward"}, {"kl_estimator": "full"}):
        with pytest.raises(ValueError, match="kl_unbiased"):
            make("grpo", kl_coef=0.1, kl_unbiased=True, **options)


def test_recompute_needs_the_learners_log_probs_and_applies_no_weights() -> None:
    correction = make("grpo", correction="recompute").correction
    assert correction is not None and correction.needs.proximal and not correction.active
    with pytest.raises(ValueError, match="reject"):
        make("grpo", correction="recompute", reject_above=2.0)
