"""Importance weights for samples of another distribution: by hand, and unbiased by enumeration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithms import make
from covey.algorithms.correction import Correction
from covey.algorithms.functional import advantages, policy_loss
from covey.protocols import Metrics
from tests.algorithms.helpers import F64, NAN, all_groups, same, samples_of, tensor, true_gradient

# Ratios π_old/q of episode 0 in rows 0 and 2, of episode 1 in row 1; NaN where nothing was sampled.
RATIO = tensor([0.5, 4.0, NAN], [1.5, NAN, NAN], [0.25, 3.0, NAN])
MASK = ~RATIO.isnan()
EPISODE = torch.tensor([0, 1, 0])
SAMPLING = tensor([-1.0, -2.0, NAN], [-0.3, NAN, NAN], [-1.1, -0.7, NAN])
OLD = SAMPLING + RATIO.log()


def weights(how: str, **options: Any) -> tuple[Tensor, Metrics]:
    found, metrics = Correction(how, **options).weights(OLD, SAMPLING, MASK, EPISODE, 2)
    return found[MASK], metrics


def test_weights_of_tokens() -> None:
    found, metrics = weights("token", correction_cap=2.0)
    same(found, [0.5, 2.0, 1.5, 0.25, 2.0])
    assert metrics["correction/capped"] == pytest.approx(2 / 5)
    assert metrics["correction/rejected"] == 0.0
    assert metrics["correction/weight_mean"] == pytest.approx(6.25 / 5)
    assert metrics["correction/mismatch"] == pytest.approx(float(RATIO.log()[MASK].abs().mean()))
    assert metrics["correction/ess"] == pytest.approx(6.25**2 / (5 * (0.25 + 4 + 2.25 + 0.0625 + 4)))


def test_weights_of_whole_answers_across_their_rows() -> None:
    # 0.5·4·0.25·3 = 1.5, as the other answer's
    same(weights("sequence", correction_cap=2.0)[0], [1.5] * 5)
    found, metrics = weights("sequence", correction_cap=1.2)
    same(found, [1.2] * 5)
    assert metrics["correction/capped"] == 1.0


def test_ratios_outside_the_band_are_rejected() -> None:
    found, metrics = weights("token", correction_cap=10.0, reject_below=0.3, reject_above=3.5)
    same(found, [0.5, 0.0, 1.5, 0.0, 3.0])
    assert metrics["correction/rejected"] == pytest.approx(2 / 5)
    same(weights("sequence", correction_cap=10.0, reject_above=1.4)[0], [0.0] * 5)
    same(weights("sequence", correction_cap=10.0, reject_below=1.6)[0], [0.0] * 5)


def test_the_band_looks_at_the_ratio_before_the_cap() -> None:
    same(weights("token", correction_cap=2.0, reject_above=3.5)[0], [0.5, 0.0, 1.5, 0.25, 2.0])


def test_geometric_rejection_looks_at_the_mean_of_an_answer() -> None:
    """Of ½, 4, ¼ and 3 it is 1.5^¼ = 1.107, of the one token 1.5: whatever the weight, also with weight 1."""
    same(
        weights("token", correction_cap=9.0, reject_level="geometric", reject_above=1.2)[0], [0.5, 4.0, 0.0, 0.25, 3.0]
    )
    same(
        weights("sequence", correction_cap=9.0, reject_level="geometric", reject_above=1.2)[0], [1.5, 1.5, 0, 1.5, 1.5]
    )
    found, metrics = weights("recompute", reject_level="geometric", reject_below=1.2)
    same(found, [0, 0, 1, 0, 0])
    assert metrics["correction/rejected"] == pytest.approx(4 / 5)
    same(weights("recompute", reject_level="token", reject_above=2.0)[0], [1, 0, 1, 1, 0])
    same(weights("token", correction_cap=9.0, reject_level="sequence", reject_above=1.4)[0], [0.0] * 5)


def test_the_geometric_mean_does_not_grow_with_the_length() -> None:
    """Each token off by 1 %: after 200 tokens the product is e², the mean still 1.01."""
    old = torch.full((1, 200), 0.01, dtype=F64)
    mask, owner = torch.ones(1, 200, dtype=torch.bool), torch.tensor([0])
    for level, kept in (("sequence", 0.0), ("geometric", 1.0)):
        made = Correction("recompute", reject_level=level, reject_above=1.02)
        same(made.weights(old, 0 * old, mask, owner, 1)[0], torch.full((1, 200), kept, dtype=F64))


def test_the_ends_of_the_band_belong_to_it() -> None:
    """On-policy every ratio is exactly 1: a band from 1 to 1 keeps all of it, and a cap of 1 changes nothing."""
    made = Correction("token", correction_cap=1.0, reject_below=1.0, reject_above=1.0)
    found, metrics = made.weights(OLD, OLD, MASK, EPISODE, 2)
    same(found[MASK], [1.0] * 5)
    assert metrics["correction/rejected"] == metrics["correction/capped"] == 0.0


def test_effective_sample_size_by_hand() -> None:
    old, mask = tensor([0.0], [2.0]).clamp(min=1e-9).log(), torch.ones(2, 1, dtype=torch.bool)
    old[0] = 0.0
    _, metrics = Correction("token").weights(old, torch.zeros(2, 1, dtype=F64), mask, torch.tensor([0, 1]), 2)
    assert metrics["correction/ess"] == pytest.approx(0.9)  # of 1 and 2


@pytest.mark.parametrize("how", ["token", "sequence"])
def test_extreme_ratios_stay_finite(how: str) -> None:
    old = tensor([500.0, 500.0], [-500.0, 0.0])
    mask = torch.ones(2, 2, dtype=torch.bool)
    found, metrics = Correction(how).weights(old, torch.zeros(2, 2, dtype=F64), mask, torch.tensor([0, 1]), 2)
    assert bool(found.isfinite().all()) and float(found.max()) <= 2.0
    assert all(abs(value) < 1e4 for value in metrics.values())
    uncapped, _ = Correction(how, correction_cap=1e30).weights(old, 0 * old, mask, torch.tensor([0, 1]), 2)
    assert float(uncapped.max()) == pytest.approx(math.exp(20))


# Theory: actions drawn from q, advantages R, the gradient of the learner's π_old.

LOGITS = tensor(0.3, -0.5, 0.9)
REWARDS = tensor(1.0, 0.2, -0.4)
OTHER = torch.log_softmax(tensor(-0.6, 0.7, 0.2), -1)  # q, full support


def gradient_from_q(how: str, tokens: int, cap: float) -> Tensor:
    """E over answers of `tokens` actions drawn from q of Σ_t A_t w_t ∇ log π(a_t); an answer's reward is Σ R(a_t)."""
    own = torch.log_softmax(LOGITS, -1)
    action = all_groups(3, tokens)[0].reshape(-1, tokens)
    chance = OTHER[action].sum(-1).exp()
    x = LOGITS.clone().requires_grad_()
    logprobs = torch.log_softmax(x, -1)[action]
    per_token = REWARDS[action] if how == "token" else REWARDS[action].sum(-1, keepdim=True).expand(action.shape)
    weight, _ = Correction(how, correction_cap=cap).weights(
        own[action], OTHER[action], torch.ones_like(action, dtype=torch.bool), torch.arange(len(action)), len(action)
    )
    (gradient,) = torch.autograd.grad((chance[:, None] * weight * per_token * logprobs).sum(), x)
    return gradient


def test_uncapped_weights_of_tokens_are_unbiased() -> None:
    """Where a token is paid for itself alone, its own ratio is enough."""
    same(gradient_from_q("token", 2, cap=1e9), 2 * true_gradient(LOGITS, REWARDS))


def test_uncapped_weights_of_answers_are_unbiased() -> None:
    """Where a token is paid for the whole answer, it takes the ratio of the whole answer."""
    same(gradient_from_q("sequence", 2, cap=1e9), 2 * true_gradient(LOGITS, REWARDS))


def test_the_cap_trades_bias_for_variance() -> None:
    assert float((gradient_from_q("token", 1, cap=1.1) - true_gradient(LOGITS, REWARDS)).abs().max()) > 1e-3


# In the algorithm.


@pytest.mark.parametrize("name", ["gpg", "reinforce_plus_plus"])
def test_the_algorithm_multiplies_its_advantages(name: str) -> None:
    """One per answer or one per token; masked tokens of the ratio are no concern."""
    step: dict[str, Any] = {"mask": MASK.tolist(), "episode": EPISODE.tolist()}
    before = make(name).advantages(samples_of([1.0, 0.0], [0, 0], **step))
    plain = before.values
    found = make(name, correction="token").advantages(
        samples_of([1.0, 0.0], [0, 0], **step, old_logprobs_RT=OLD, sampling_logprobs_RT=SAMPLING)
    )
    per_token = plain if plain.dim() == 2 else plain[EPISODE][:, None].expand(3, 3)
    same(found.values[MASK], (per_token * RATIO.clamp(max=2.0))[MASK])
    assert found.metrics["correction/weight_mean"] == pytest.approx(6.25 / 5)
    assert found.metrics.items() >= before.metrics.items()


def test_without_log_probs_of_another_engine_there_is_nothing_to_correct() -> None:
    found = make("rloo", correction="token").advantages(samples_of([1.0, 0.0], [0, 0]))
    same(found.values, [1.0, -1.0])
    assert found.metrics == {}


def test_no_correction_corrects_nothing() -> None:
    """Though the log-probs to correct with are at hand."""
    samples = samples_of(
        [1.0, 0.0], [0, 0], old_logprobs_RT=tensor([-1.0], [-1.0]), sampling_logprobs_RT=tensor([-1.5], [-1.0])
    )
    values = make("rloo", correction="none").advantages(samples).values
    same(values.flatten(), [1.0, -1.0])
    zeros, ones = torch.zeros(1, 1, dtype=F64), torch.ones(1, 1)
    loss, _ = policy_loss("grpo", zeros, zeros, tensor(1.0), ones, sampling_logprobs=zeros - 0.5, correction="none")
    same(loss, -1.0)


def test_the_function_corrects_with_the_sampling_log_probs() -> None:
    """Of each token unless said otherwise: ratios 1.5 and ½, and 4 and 1."""
    zeros, advantage = torch.zeros(2, 2, dtype=F64), tensor(1.0, 3.0)
    other = -tensor([1.5, 0.5], [4.0, 1.0]).log()

    def loss(**options: Any) -> tuple[Tensor, Metrics]:
        return policy_loss("grpo", zeros, zeros, advantage, zeros + 1, sampling_logprobs=other, **options)

    found, metrics = loss()
    same(found, -((1.5 + 0.5) / 2 * 1 + (2.0 + 1.0) / 2 * 3) / 2)
    assert metrics["correction/capped"] == 0.25
    same(loss(correction="sequence", correction_cap=9.0)[0], -(0.75 * 1 + 4.0 * 3) / 2)
    # a rejected token keeps its place in the mean
    same(loss(correction_cap=9.0, reject_below=1.2)[0], -(1.5 / 2 * 1 + 4.0 / 2 * 3) / 2)


def test_with_gvpo_it_is_refused() -> None:
    zeros = torch.zeros(2, 1)
    with pytest.raises(ValueError, match="valid for samples of any policy"):
        policy_loss("gvpo", zeros, zeros, zeros[:, 0], zeros, groups=[0, 0], sampling_logprobs=zeros)


def test_what_is_needed_and_what_cannot_be() -> None:
    assert make("grpo", correction="token").needs.proximal and make("grpo", correction="sequence").needs.proximal
    assert not make("grpo", correction="none").needs.proximal and not make("grpo").needs.proximal
    with pytest.raises(ValueError, match="correction must be one of auto, none, recompute, token"):
        make("grpo", correction="tokens")
    with pytest.raises(ValueError, match="correction_cap must be a number above 0"):
        make("grpo", correction_cap=0.0)
    with pytest.raises(ValueError, match="need correction=token or sequence"):
        make("grpo", correction="none", reject_above=2.0)
    with pytest.raises(ValueError, match="or recompute with reject_level"):
        make("grpo", correction="recompute", reject_above=2.0)
    with pytest.raises(ValueError, match="reject_level needs reject_below or reject_above"):
        make("grpo", correction="token", reject_level="geometric")
    with pytest.raises(ValueError, match="reject_level must be one of auto, token, sequence, geometric, got 'mean'"):
        make("grpo", reject_level="mean", reject_above=2.0)
    assert make("grpo", correction="recompute", reject_level="geometric", reject_above=2.0).needs.proximal


def test_weights_carry_no_gradient() -> None:
    old = OLD.clone().requires_grad_()
    found, _ = Correction("token").weights(old, SAMPLING, MASK, EPISODE, 2)
    assert not found.requires_grad
    assert advantages("rloo", tensor(1, 0), [0, 0]).requires_grad is False
