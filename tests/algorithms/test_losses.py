"""The losses of a token: value and gradient against the papers' formulas written out, clip fractions, extremes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithms import LOSSES, make
from covey.algorithms.functional import policy_loss
from covey.algorithms.gspo import Gspo
from covey.types import Batch
from tests.algorithms.helpers import (
    EXCHANGEABLE,
    F64,
    PAIRED,
    outputs,
    random_batch,
    same,
    tensor,
    total_loss,
    value_and_gradient,
)

RATIO_LOSSES = [name for name in EXCHANGEABLE if not LOSSES[name].objective.on_policy_only]  # type: ignore[attr-defined]

Formula = Callable[[Tensor, Tensor, Tensor], Tensor]  # of log π, log π_old and A of one token


def ppo(low: float, high: float, dual: float | None) -> Formula:
    def loss(new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        ratio = torch.exp(new - old)
        if advantage >= 0:
            return -advantage * torch.minimum(ratio, tensor(1 + high)[0])
        bounded = torch.maximum(ratio, tensor(1 - low)[0])
        return -advantage * (bounded if dual is None else torch.minimum(bounded, tensor(dual)[0]))

    return loss


def cispo(new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    weight = min(max(math.exp(float((new - old).detach())), 1 - 0.4), 1 + 0.5)
    return -weight * advantage * new


def sapo(new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    tau = 2.0 if advantage > 0 else 3.0
    return -4 / tau / (1 + torch.exp(-tau * (torch.exp(new - old) - 1))) * advantage


def reinforce(new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    return -advantage * new


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "options", "formula"),
    [
        ("ppo_clip", {}, ppo(0.2, 0.2, 3.0)),
        ("ppo_clip", {"clip_low": 0.05, "clip_high": 0.6, "dual_clip": None}, ppo(0.05, 0.6, None)),
        ("ppo_clip", {"dual_clip": 1.1}, ppo(0.2, 0.2, 1.1)),
        ("dapo", {}, ppo(0.2, 0.28, 3.0)),
        ("dr_grpo", {}, ppo(0.2, 0.2, 3.0)),
        ("cispo", {"clip_low": 0.4, "clip_high": 0.5}, cispo),
        ("sapo", {"tau_pos": 2.0, "tau_neg": 3.0}, sapo),
        ("policy_gradient", {}, reinforce),
    ],
)
def test_value_and_gradient_of_every_token(name: str, options: dict[str, Any], formula: Formula, seed: int) -> None:
    """Far enough off-policy that every branch is taken."""
    logprobs, batch = random_batch(seed, spread=0.8)
    algorithm = make("grpo", loss=name, aggregation="seq-mean-token-sum", **options)

    def by_formula(x: Tensor) -> Tensor:
        tokens = [
            formula(x[r, t], batch.old_logprobs_RT[r, t], batch.advantages_RT[r, t])
            for r, t in batch.mask_RT.nonzero().tolist()
        ]
        return torch.stack(tokens).sum() / 7

    found = value_and_gradient(lambda x: total_loss(algorithm, x, batch), logprobs)
    expected = value_and_gradient(by_formula, logprobs)
    same(found[0], expected[0])
    same(found[1], expected[1])


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
    found, _ = policy_loss("ppo_clip", tensor([math.log(ratio)]), tensor([0.0]), tensor(advantage), torch.ones(1, 1))
    same(found, expected)


# GSPO.


def gspo_of_the_paper(x: Tensor, batch: Batch, advantage_N: Tensor, low: float, high: float) -> Tensor:
    """−mean_i min(s_i A_i, clip(s_i) A_i), with gradient through s_i = (Π π/π_old)^{1/|y_i|} over all rows."""
    losses = []
    for episode in range(7):
        own = batch.mask_RT & (batch.episode_R == episode)[:, None]
        s = torch.exp((x - batch.old_logprobs_RT)[own].mean())
        losses.append(-torch.minimum(s * advantage_N[episode], s.clamp(1 - low, 1 + high) * advantage_N[episode]))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.1, 0.2)])
def test_gspo_is_the_papers_sequence_loss(low: float, high: float, seed: int) -> None:
    """Its token form, averaged over an answer, has value and gradient of the sequence form, also across rows."""
    advantage_N = tensor(0.5, -1.0, 2.0, -0.3, 1.2, -2.0, 0.7)
    logprobs, batch = random_batch(seed)
    batch = replace(batch, advantages_RT=advantage_N[batch.episode_R][:, None].expand(9, 5))
    algorithm = make("gspo", clip_low=low, clip_high=high)
    found = value_and_gradient(lambda x: total_loss(algorithm, x, batch), logprobs)
    expected = value_and_gradient(lambda x: gspo_of_the_paper(x, batch, advantage_N, low, high), logprobs)
    same(found[0], expected[0])
    same(found[1], expected[1])


def test_gspo_with_advantages_of_tokens() -> None:
    """The value is −min(s A_t, clip(s) A_t); the gradient of an unclipped token s·A_t, of its own log-prob alone."""
    logprobs, batch = random_batch(3)
    episode, unclipped = batch.episode_R, Gspo(clip_low=10.0, clip_high=10.0)
    sums = torch.zeros(7, dtype=F64).index_add(0, episode, ((logprobs - batch.old_logprobs_RT) * batch.mask_RT).sum(-1))
    s = torch.exp(sums / batch.length_N)[episode][:, None]
    value, gradient = value_and_gradient(lambda x: unclipped.loss(outputs(x), batch)[batch.mask_RT].sum(), logprobs)
    same(gradient, -s * batch.advantages_RT * batch.mask_RT)
    same(value, -(s * batch.advantages_RT * batch.mask_RT).sum())


# Metrics.


def test_clip_fractions_by_hand() -> None:
    """Ratios ½ and 2: clipped where they lie beyond the bound on the side that the advantage pushes to."""
    ratio = tensor([0.5, 0.5, 2.0, 2.0, 1.0, 2.0])
    advantage = tensor([-1.0, 1.0, -1.0, 1.0, 1.0, 1.0])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
    for name in ("ppo_clip", "dapo"):
        _, found = policy_loss(name, ratio.log(), torch.zeros(1, 6, dtype=F64), advantage, mask)
        assert (found["policy/clip_low"], found["policy/clip_high"]) == pytest.approx((0.2, 0.2))
    _, found = policy_loss("ppo_clip", ratio.log(), torch.zeros(1, 6, dtype=F64), advantage, mask, clip_high=1.5)
    assert (found["policy/clip_low"], found["policy/clip_high"]) == pytest.approx((0.2, 0.0))


def test_clip_fractions_of_cispo_do_not_ask_for_the_advantage() -> None:
    ratio, ones = tensor([0.5, 0.5, 4.5, 5.5]), torch.ones(1, 4, dtype=F64)
    _, found = policy_loss("cispo", ratio.log(), 0 * ones, -ones, ones, clip_low=0.2)
    assert (found["policy/clip_low"], found["policy/clip_high"]) == pytest.approx((0.5, 0.25))


def test_clip_fractions_of_gspo_count_whole_answers() -> None:
    """Geometric means 2 and ½: all 3 tokens of the first are clipped above, the one of the second below."""
    logprobs = tensor([math.log(8), 0.0, 0.0], [math.log(0.5), 0.0, 0.0])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    _, found = policy_loss("gspo", logprobs, torch.zeros(2, 3, dtype=F64), tensor(1.0, -1.0), mask)
    assert (found["policy/clip_low"], found["policy/clip_high"]) == pytest.approx((0.25, 0.75))


def test_the_gate_of_sapo_by_hand() -> None:
    """σ' · 4: at r = 1 fully open; at r = 2 with τ = 1 it is 4σ(1)(1 − σ(1))."""
    logprobs, zeros = tensor([0.0, math.log(2)]), torch.zeros(1, 2, dtype=F64)
    _, found = policy_loss("sapo", logprobs, zeros, tensor(1.0), torch.ones(1, 2))
    s = 1 / (1 + math.exp(-1))
    assert found["policy/gate"] == pytest.approx((1 + 4 * s * (1 - s)) / 2)


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_include_the_value_of_each_term(name: str) -> None:
    logprobs, batch = random_batch()
    options: dict[str, Any] = {"groups": [0, 0, 0, 1, 1, 1, 2, 2, 2]}
    options |= {} if name in PAIRED else {"kl_coef": 0.1, "kl_old_coef": 0.2}
    loss, found = policy_loss(
        name,
        logprobs,
        batch.old_logprobs_RT,
        batch.advantages_RT,
        batch.mask_RT,
        ref_logprobs=batch.ref_logprobs_RT,
        **options,
    )
    names = {"gvpo": ["gvpo"], "online_dpo": ["policy"]}.get(name, ["policy", "kl", "kl_old"])
    assert sum(found[f"{term}/loss"] for term in names) == pytest.approx(float(loss))


# Theory and extremes.


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", [name for name in RATIO_LOSSES if name != "clip_cov"])  # which leaves tokens out
def test_on_policy_every_loss_is_the_policy_gradient(name: str, aggregation: str) -> None:
    _, batch = random_batch()
    at = batch.old_logprobs_RT
    _, plain = value_and_gradient(
        lambda x: total_loss(make("grpo", loss="policy_gradient", aggregation=aggregation), x, batch), at
    )
    _, found = value_and_gradient(lambda x: total_loss(make("grpo", loss=name, aggregation=aggregation), x, batch), at)
    same(found, plain)


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_stay_finite(name: str) -> None:
    """e^500 overflows float32, and its square float64."""
    options: dict[str, Any] = {} if name in PAIRED else {"kl_coef": 0.1, "kl_old_coef": 0.1}
    for dtype in (torch.float32, F64):
        for shift in (500.0, -500.0):
            x = torch.tensor([[-1.0 + shift], [-1.0 - shift], [-1.0 + shift]], dtype=dtype, requires_grad=True)
            old = torch.full((3, 1), -1.0, dtype=dtype)
            advantage = torch.tensor([1.0, -1.0, -1.0], dtype=dtype)
            loss, metrics = policy_loss(
                name, x, old, advantage, torch.ones(3, 1), groups=[0, 0, 0], ref_logprobs=old, **options
            )
            (gradient,) = torch.autograd.grad(loss, x)
            assert bool(loss.isfinite()) and bool(gradient.isfinite().all())
            assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo_clip", {"clip_low": -0.1}, "algorithm.clip_low must be a number from 0"),
        ("ppo_clip", {"clip_high": -0.1}, "algorithm.clip_high must be a number from 0"),
        ("ppo_clip", {"dual_clip": 1.0}, "dual_clip must be a number above 1"),
        ("gspo", {"clip_low": -0.1}, "algorithm.clip_low must be a number from 0"),
        ("cispo", {"clip_high": -0.1}, "algorithm.clip_high must be a number from 0"),
        ("sapo", {"tau_neg": 0.0}, "tau_neg must be a number above 0"),
    ],
)
def test_what_cannot_be_is_refused(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("grpo", loss=name, **options)


def test_losses_that_are_valid_off_policy() -> None:
    wrong = {name for name in LOSSES if make(name if name in PAIRED else "grpo", loss=name).objective.on_policy_only}
    assert wrong == {"policy_gradient"}
