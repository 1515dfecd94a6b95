"""KL estimators by hand and by enumeration, the KL in the loss and in the reward, and the adaptive controller."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithms import make
from covey.algorithms.functional import policy_loss
from covey.algorithms.kl import KL_NAMES, Kl, kl_penalty
from covey.types import Samples
from tests.algorithms.helpers import F64, NAN, outputs, random_batch, same, samples_of, tensor, total_loss

POLICY = torch.log_softmax(tensor(0.1, 0.9, -0.4), -1)
REFERENCE = torch.log_softmax(tensor(1.1, 0.0, 0.3), -1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) from log-probs."""
    return (p.exp() * (p - q)).sum()


# Estimators.


@pytest.mark.parametrize(
    ("name", "d", "expected"),
    [
        ("k3", 0.5, math.exp(0.5) - 1.5),
        ("k3", -0.5, math.exp(-0.5) - 0.5),
        ("low_var_kl", 0.5, 0.14872127070012814),
        ("k1", 0.5, -0.5),
        ("kl", -0.5, 0.5),
        ("abs", -0.5, 0.5),
        ("abs", 0.5, 0.5),
        ("k2", 0.5, 0.125),
        ("mse", -0.5, 0.125),
    ],
)
def test_estimators_by_hand(name: str, d: float, expected: float) -> None:
    same(kl_penalty(tensor(-1.0), tensor(-1.0 + d), name), [expected])


def test_k3_keeps_its_digits_where_the_policies_almost_agree() -> None:
    """d²/2 + d³/6, which exp(d) − 1 − d would lose to rounding."""
    same(kl_penalty(tensor(0.0), tensor(1e-6), "k3") * 1e12, [0.5], 1e-3)


def test_an_unknown_estimator_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; known: k1, kl, abs, k2"):
        kl_penalty(tensor(0.0), tensor(0.0), "k4")
    with pytest.raises(ValueError, match="kl_estimator must be one of k1, kl, abs, k2, mse, k3, low_var_kl, full"):
        Kl(kl_estimator="k4")


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(name: str) -> None:
    same((POLICY.exp() * kl_penalty(POLICY, REFERENCE, name)).sum(), kl(POLICY, REFERENCE))


def mean_gradient(name: str) -> Tensor:
    """E over the policy's own samples of the estimator's gradient in the logits; the samples stay what they are."""
    logits = POLICY.clone().requires_grad_()
    current = torch.log_softmax(logits, -1)
    (gradient,) = torch.autograd.grad((POLICY.exp() * kl_penalty(current, REFERENCE, name)).sum(), logits)
    return gradient


def test_in_the_loss_only_k2_has_the_gradient_of_the_kl_on_policy() -> None:
    logits = POLICY.clone().requires_grad_()
    (true,) = torch.autograd.grad(kl(torch.log_softmax(logits, -1), REFERENCE), logits)
    same(mean_gradient("k2"), true)
    same(mean_gradient("k1"), torch.zeros(3))  # the reason for the remark
    # k3's is that of KL(π_ref ‖ π)
    logits = POLICY.clone().requires_grad_()
    (reverse,) = torch.autograd.grad(kl(REFERENCE, torch.log_softmax(logits, -1)), logits)
    same(mean_gradient("k3"), reverse)


@pytest.mark.parametrize("name", sorted(set(KL_NAMES) - {"k1", "kl"}))
def test_no_gradient_points_away_from_the_reference(name: str) -> None:
    """Descending must never lower log π where it lies below the reference, nor raise it where it lies above; however
    far the two are apart, and with finite numbers."""
    for d in (-500.0, -25.0, -1.0, 1.0, 19.0, 21.0, 500.0):
        logprob = tensor(-1.0).requires_grad_()
        value = kl_penalty(logprob, tensor(-1.0 + d), name)
        (gradient,) = torch.autograd.grad(value.sum(), logprob)
        assert bool(value.isfinite()) and bool(value > 0) and bool(gradient.isfinite())
        assert float(gradient) * d <= 0, f"at d = {d} the gradient is {float(gradient)}"


# In the loss.


def test_in_the_loss_it_is_added_with_its_coefficient() -> None:
    zeros, reference = torch.zeros(1, 2, dtype=F64), tensor([0.5, 0.5])
    loss, metrics = policy_loss(
        "grpo", zeros, zeros, tensor(0.0), torch.ones(1, 2), ref_logprobs=reference, kl_coef=0.1
    )
    same(loss, 0.1 * (math.exp(0.5) - 1.5))
    assert metrics["kl/reference"] == pytest.approx(math.exp(0.5) - 1.5)
    assert metrics["kl/loss"] == pytest.approx(0.1 * (math.exp(0.5) - 1.5))


def test_in_the_loss_it_is_summed_up_as_the_policy_loss_is() -> None:
    logprobs, batch = random_batch()
    for how in ("token-mean", "seq-mean-token-sum"):
        algorithm = make("grpo", aggregation=how, kl_coef=0.3, kl_estimator="k2")
        assert batch.ref_logprobs_RT is not None
        penalty = (batch.ref_logprobs_RT - logprobs) ** 2 / 2
        expected = 0.3 * penalty[batch.mask_RT].sum() / (27 if how == "token-mean" else 7)
        same(
            total_loss(algorithm, logprobs, batch) - total_loss(make("grpo", aggregation=how), logprobs, batch),
            expected,
        )


def test_kl_to_the_sampling_policy_is_that_of_its_own_samples() -> None:
    """Enumerating what the sampling policy draws: E of the loss is KL(π_old ‖ π), and its gradient the KL's."""
    logits = POLICY.clone().requires_grad_()
    current, old = torch.log_softmax(logits, -1), REFERENCE
    terms = [
        policy_loss("grpo", current[[a]][None], old[[a]][None], tensor(0.0), torch.ones(1, 1), kl_old_coef=1.0)[0]
        for a in range(3)
    ]
    expected_loss = (old.exp() * torch.stack(terms)).sum()
    exact = kl(old, torch.log_softmax(logits, -1))
    same(expected_loss.detach(), exact.detach())
    same(torch.autograd.grad(expected_loss, logits)[0], torch.autograd.grad(exact, logits)[0])


def test_both_kls_beside_each_other() -> None:
    logprobs, batch = random_batch()
    terms = make("grpo", kl_coef=0.1, kl_old_coef=0.2).loss(outputs(logprobs), batch)
    assert list(terms) == ["policy", "kl", "kl_old"]
    assert list(make("grpo").loss(outputs(logprobs), batch)) == ["policy"]


def test_the_full_kl_comes_from_the_whole_vocabulary() -> None:
    logprobs, batch = random_batch()
    full = torch.rand(9, 5, dtype=F64)
    algorithm = make("grpo", kl_coef=0.5, kl_estimator="full", aggregation="token-mean")
    out = outputs(logprobs, full_kl=full)
    same(algorithm.loss(out, batch)["kl"].sum, 0.5 * full[batch.mask_RT].sum())
    assert algorithm.metrics(out, batch)["kl/reference"] == pytest.approx(float(full[batch.mask_RT].mean()))


def test_the_function_cannot_have_the_full_kl() -> None:
    zeros = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="needs logits of the whole vocabulary"):
        policy_loss("grpo", zeros, zeros, zeros[0], zeros, ref_logprobs=zeros, kl_coef=0.1, kl_estimator="full")


# In the reward.

MASK = [[1, 1, 0], [1, 0, 1], [1, 0, 0]]


def shaped_step(hole: float = 7.0, **columns: Any) -> Samples:
    """Episode 0 has rows 0 and 2; `hole` is what the reference says where nothing was sampled."""
    old = tensor([-1.0, -2.0, 9.0], [-0.5, 9.0, -1.5], [-3.0, 9.0, 9.0])
    ref = tensor([-1.5, -1.0, hole], [-0.75, hole, -1.5], [-2.5, hole, hole])
    return samples_of(
        [1.0, 0.0], [0, 0], mask=MASK, episode=[0, 1, 0], old_logprobs_RT=old, ref_logprobs_RT=ref, **columns
    )


K1 = tensor([0.5, -1.0, 0.0], [0.25, 0.0, 0.0], [-0.5, 0.0, 0.0])


@pytest.mark.parametrize("before", [None, torch.full((3, 3), 2.0, dtype=F64)])
def test_in_the_reward_every_sampled_token_has_its_own_penalty(before: Tensor | None) -> None:
    algorithm = make("reinforce_plus_plus", kl_coef=0.1, kl_in="reward")
    samples, metrics = algorithm.shape(shaped_step(token_rewards_RT=before))
    same(samples.token_rewards_RT, (0 if before is None else before) - 0.1 * K1)
    # per episode: Σ = −1 over 3 tokens and 0.25 over 2
    assert metrics["kl/coef"] == 0.1
    assert metrics["kl/samples"] == pytest.approx((-1 / 3 + 0.25 / 2) / 2)
    assert metrics["kl/reward"] == pytest.approx(-0.1 * (-1 + 0.25) / 2)


def test_in_the_reward_it_reaches_the_advantage_and_not_the_loss() -> None:
    """R = 1 + 0.1 and 0 − 0.025."""
    algorithm = make("rloo", kl_coef=0.1, kl_in="reward")
    samples, _ = algorithm.shape(shaped_step())
    same(algorithm.advantages(samples).values, [1.125, -1.125])
    logprobs, batch = random_batch()
    assert list(algorithm.loss(outputs(logprobs), batch)) == ["policy"]


def test_in_the_reward_nothing_leaks_from_where_nothing_was_sampled() -> None:
    algorithm = make("rloo", kl_coef=0.1, kl_in="reward")
    samples, metrics = algorithm.shape(shaped_step(hole=NAN))
    assert all(math.isfinite(value) for value in metrics.values())
    same(algorithm.advantages(samples).values, [1.125, -1.125])


def test_the_full_kl_in_the_reward_is_that_of_the_samples() -> None:
    full = torch.rand(3, 3, dtype=F64)
    algorithm = make("rloo", kl_coef=0.1, kl_in="reward", kl_estimator="full")
    samples, _ = algorithm.shape(shaped_step(full_kl_RT=full))
    same(samples.token_rewards_RT, -0.1 * full * torch.tensor(MASK))


def test_without_a_coefficient_nothing_is_shaped() -> None:
    samples = shaped_step()
    for options in ({}, {"kl_in": "reward"}, {"kl_coef": 0.1}):
        found, metrics = make("grpo", **options).shape(samples)
        assert found is samples and metrics == {}


# The controller.


def step_of(kl_per_token: float, episodes: int = 4) -> Samples:
    """Every token's k1 is the same."""
    ones = torch.ones(episodes, 2, dtype=F64)
    return samples_of(
        [0.0] * episodes,
        [0] * episodes,
        mask=[[1, 1]] * episodes,
        old_logprobs_RT=-ones,
        ref_logprobs_RT=-ones - kl_per_token,
    )


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_controller_follows_its_formula(where: str) -> None:
    """β ← β (1 + clip(KL/target − 1, ±0.2)·n/horizon): above, far above, far below and on target."""
    steered = Kl(kl_coef=0.5, kl_in=where, kl_estimator="k1", kl_target=0.1, kl_horizon=40.0)
    coef = 0.5
    for measured, error in ((0.11, 0.1), (0.5, 0.2), (0.01, -0.2), (0.1, 0.0)):
        _, metrics = steered.shape(step_of(measured))
        assert metrics["kl/samples"] == pytest.approx(measured)
        before, coef = coef, coef * (1 + error * 4 / 40)
        assert steered.coef == pytest.approx(coef)
        # what the step uses: the reward was charged before the controller moved, the loss comes after it
        assert metrics["kl/coef"] == pytest.approx(before if where == "reward" else coef)


def test_a_step_larger_than_the_horizon_moves_it_by_a_fifth_at_most() -> None:
    steered = Kl(kl_coef=0.5, kl_estimator="k1", kl_target=0.1, kl_horizon=1.0)
    steered.shape(step_of(0.0001))
    assert steered.coef == pytest.approx(0.4)
    with pytest.raises(ValueError, match="kl_horizon must be a number above 0"):
        Kl(kl_horizon=0)


def test_the_loss_uses_the_adapted_coefficient() -> None:
    algorithm = make("grpo", kl_coef=0.5, kl_target=0.1, kl_horizon=4.0, kl_estimator="k2")
    logprobs, batch = random_batch()
    before = algorithm.loss(outputs(logprobs), batch)["kl"].sum
    algorithm.shape(step_of(1.0))  # k2 = ½: far above the target
    same(algorithm.loss(outputs(logprobs), batch)["kl"].sum, 1.2 * before)


def test_the_penalty_of_a_step_is_charged_before_the_controller_moves() -> None:
    algorithm = make("rloo", kl_coef=0.5, kl_in="reward", kl_target=0.1, kl_horizon=4.0)
    samples, _ = algorithm.shape(step_of(0.5))
    same(samples.token_rewards_RT, torch.full((4, 2), -0.25, dtype=F64))
    samples, _ = algorithm.shape(step_of(0.5))
    same(samples.token_rewards_RT, torch.full((4, 2), -0.3, dtype=F64))


def test_its_state_survives_a_resume() -> None:
    settings: dict[str, Any] = {"kl_coef": 0.5, "kl_target": 0.1, "kl_horizon": 10.0}
    first, resumed = make("grpo", **settings), make("grpo", **settings)
    first.shape(step_of(0.5))
    state = json.loads(json.dumps(first.state_dict()))
    resumed.load_state_dict(state)
    assert resumed.kl is not None and first.kl is not None
    assert resumed.kl.coef == first.kl.coef != 0.5
    assert make("grpo", kl_coef=0.5).state_dict() == {}
    with pytest.raises(ValueError, match=r"grpo has the state \[\], but the checkpoint holds \['kl'\]"):
        make("grpo", kl_coef=0.5).load_state_dict(state)


# Settings.


def test_what_is_needed_follows_from_the_settings() -> None:
    def needs(**options: Any) -> tuple[bool, bool, bool]:
        found = make("grpo", **options).needs
        return found.reference, found.full_kl, found.sample_full_kl

    assert needs() == (False, False, False)
    assert needs(kl_old_coef=0.1) == (False, False, False)
    assert needs(kl_coef=0.1) == (True, False, False)
    assert needs(kl_coef=0.1, kl_in="reward") == (True, False, False)
    assert needs(kl_coef=0.1, kl_estimator="full") == (True, True, False)
    assert needs(kl_coef=0.1, kl_estimator="full", kl_in="reward") == (True, False, True)
    assert needs(kl_coef=0.1, kl_estimator="full", kl_target=0.1) == (True, True, True)
    assert needs(kl_estimator="full") == (False, False, False)


def test_k1_in_the_loss_gives_a_warning() -> None:
    for name in ("k1", "kl"):
        assert "mean zero" in make("grpo", kl_coef=0.1, kl_estimator=name).remarks()[0]
    assert make("grpo", kl_coef=0.1, kl_estimator="k1", kl_in="reward").remarks() == []
    assert make("grpo", kl_coef=0.1).remarks() == make("grpo", kl_estimator="k1").remarks() == []


def test_the_estimator_of_auto() -> None:
    assert Kl(kl_coef=0.1).kl_estimator == "k3"
    assert Kl(kl_coef=0.1, kl_in="reward").kl_estimator == "k1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_in": "prompt"}, "kl_in must be loss or reward"),
        ({"kl_coef": -0.1}, "algorithm.kl_coef must be a number from 0"),
        ({"kl_old_coef": -0.1}, "algorithm.kl_old_coef must be a number from 0"),
        ({"kl_target": 0.1}, "kl_target steers kl_coef"),
        ({"kl_coef": 0.1, "kl_target": 0.0}, "kl_target must be a number above 0"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("grpo", **options)


def test_the_kl_to_the_reference_is_a_metric_without_a_coefficient() -> None:
    """Where reference log-probs are at hand, the KL is a metric, though kl_coef is 0."""
    logprobs, batch = random_batch()
    assert batch.ref_logprobs_RT is not None
    expected = kl_penalty(logprobs, batch.ref_logprobs_RT, "k3")[batch.mask_RT].mean()
    assert make("grpo").metrics(outputs(logprobs), batch)["kl/reference"] == pytest.approx(float(expected))
    assert "kl/reference" not in make("grpo").metrics(outputs(logprobs), replace(batch, ref_logprobs_RT=None))


def test_a_step_without_a_sampled_token_has_no_kl() -> None:
    """Not the mean of nothing, which is NaN."""
    ref = tensor([-1.0], [-2.0])
    samples = samples_of([1.0, 0.0], [0, 0], mask=[[0], [0]], ref_logprobs_RT=ref)
    _, metrics = Kl(kl_coef=0.1, kl_in="reward").shape(samples)
    assert metrics == {"kl/samples": 0.0, "kl/reward": 0.0, "kl/coef": 0.1}
