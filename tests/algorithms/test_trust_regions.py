"""Losses that bound an update by other means than PPO's clip: DPPO, GMPO, VESPO, LUSPO, Clip-Cov, KL-Cov. Value and
gradient against the papers' formulas written out, and their limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithms import make
from covey.algorithms.covariance import ClipCov, KlCov
from covey.algorithms.functional import policy_loss
from covey.errors import InputError
from covey.types import Batch
from tests.algorithms.helpers import F64, outputs, random_batch, same, tensor, total_loss, value_and_gradient

ADVANTAGE_N = tensor(0.5, -1.0, 2.0, -0.3, 1.2, -2.0, 0.7)


def of_answers(seed: int, spread: float = 0.3) -> tuple[Tensor, Batch]:
    """The random batch with one advantage per answer."""
    logprobs, batch = random_batch(seed, spread=spread)
    return logprobs, replace(batch, advantages_RT=ADVANTAGE_N[batch.episode_R][:, None].expand(9, 5))


def log_ratios(x: Tensor, batch: Batch) -> list[Tensor]:
    """log π/π_old of the sampled tokens of each episode."""
    own = [batch.mask_RT & (batch.episode_R == episode)[:, None] for episode in range(7)]
    return [(x - batch.old_logprobs_RT)[mask] for mask in own]


def agree(name: str, options: dict[str, Any], formula: Callable[[Tensor], Tensor], at: Tensor, batch: Batch) -> None:
    algorithm = make("grpo", loss=name, **options)
    found = value_and_gradient(lambda x: total_loss(algorithm, x, batch), at)
    expected = value_and_gradient(formula, at)
    same(found[0], expected[0])
    same(found[1], expected[1])


# DPPO.


def divergence(p: float, q: float, kind: str) -> float:
    if kind == "tv":
        return abs(p - q)
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_is_the_papers_loss(kind: str, seed: int) -> None:
    """Σ over tokens / 10, mean over answers; far enough apart that tokens of both signs are masked."""
    logprobs, batch = random_batch(seed, spread=0.6)
    low, high = (0.05, 0.08) if kind == "tv" else (0.01, 0.02)
    masked = []

    def formula(x: Tensor) -> Tensor:
        losses = []
        for r, t in batch.mask_RT.nonzero().tolist():
            advantage, old = batch.advantages_RT[r, t], batch.old_logprobs_RT[r, t]
            p, q = math.exp(float(x[r, t].detach())), math.exp(float(old))
            away, bound = (p > q, high) if advantage > 0 else (p < q, low)
            out = away and divergence(p, q, kind) > bound
            masked.append((out, bool(advantage > 0)))
            losses.append(torch.zeros((), dtype=F64) if out else -torch.exp(x[r, t] - old) * advantage)
        return torch.stack(losses).sum() / 10 / 7

    logprobs = logprobs.clamp(max=-0.05)  # probabilities below 1
    agree(f"dppo_{kind}", {"clip_low": low, "clip_high": high}, formula, logprobs, batch)
    assert {(True, True), (True, False), (False, True), (False, False)} == set(masked)


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_without_bounds_is_the_unclipped_ratio(kind: str) -> None:
    logprobs, batch = random_batch(1, spread=0.8)
    logprobs = logprobs.clamp(max=-0.05)
    options = {"clip_low": 1e30, "clip_high": 1e30}
    plain = {"clip_low": 1e30, "clip_high": 1e30, "dual_clip": None, "aggregation": "seq-mean-token-sum-norm"}
    unclipped = make("grpo", loss="ppo_clip", **plain)
    agree(f"dppo_{kind}", options, lambda x: total_loss(unclipped, x, batch), logprobs, batch)


def test_dppo_bounds_probability_and_not_the_ratio() -> None:
    """A ratio of 100 on a rare token passes, 0.5 → 0.7 does not; moving back always does; beyond the cap, the cap."""
    old, new = tensor([1e-5, 0.5, 0.5, 0.5]), tensor([1e-3, 0.7, 0.7, 0.3])
    advantage, mask = tensor([1.0, 1.0, -1.0, 1.0]), torch.ones(1, 4)
    loss, metrics = policy_loss("dppo_tv", new.log(), old.log(), advantage, mask, ratio_cap=None)
    same(loss, -(100 + 0 - 1.4 + 0.6) / 4)
    assert (metrics["policy/clip_low"], metrics["policy/clip_high"]) == (0.0, 0.25)
    capped, _ = policy_loss("dppo_tv", new.log(), old.log(), advantage, mask)
    same(capped, -(20 + 0 - 1.4 + 0.6) / 4)


def test_the_gradient_beyond_the_cap_is_that_of_the_cap() -> None:
    x = tensor([math.log(1e-3)]).requires_grad_()
    loss, _ = policy_loss("dppo_tv", x, tensor([math.log(1e-5)]), tensor(2.0), torch.ones(1, 1))
    same(torch.autograd.grad(loss, x)[0], [[-40]])


# GMPO.


def gmpo_of_the_paper(x: Tensor, batch: Batch, low: float, high: float) -> Tensor:
    losses = []
    for advantage, d in zip(ADVANTAGE_N, log_ratios(x, batch), strict=True):
        clipped = d.clamp(max=high) if advantage > 0 else d.clamp(min=-low)
        losses.append(-clipped.mean().exp() * advantage)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.1, 0.3)])
def test_gmpo_is_the_papers_loss(low: float, high: float, seed: int) -> None:
    logprobs, batch = of_answers(seed, spread=0.6)
    agree(
        "gmpo", {"clip_low": low, "clip_high": high}, lambda x: gmpo_of_the_paper(x, batch, low, high), logprobs, batch
    )


def test_gmpo_of_one_token_is_the_clipped_ratio_of_grpo() -> None:
    """With bounds log 0.8 and log 1.2 on the log-ratio."""
    logprobs, old = tensor([-1.0], [-0.3], [-2.0], [-0.9]), tensor([-1.4], [-0.5], [-1.2], [-0.8])
    advantage, mask = tensor(1, 1, -1, -1), torch.ones(4, 1)
    bounds = {"clip_low": -math.log(0.8), "clip_high": math.log(1.2)}
    found = value_and_gradient(lambda x: policy_loss("gmpo", x, old, advantage, mask, **bounds)[0], logprobs)
    ppo = value_and_gradient(lambda x: policy_loss("grpo", x, old, advantage, mask, dual_clip=None)[0], logprobs)
    same(found[0], ppo[0])
    same(found[1], ppo[1])


def test_gmpo_without_bounds_is_gspo_without_bounds() -> None:
    logprobs, batch = of_answers(4)
    free = {"clip_low": 1e30, "clip_high": 1e30}
    gspo = make("grpo", loss="gspo", clip_low=1e6, clip_high=1e6)
    agree("gmpo", free, lambda x: total_loss(gspo, x, batch), logprobs, batch)


def test_clip_fractions_of_gmpo() -> None:
    log_ratio, advantage = tensor([0.5, -0.5, 0.5, -0.5]), tensor([1.0, 1.0, -1.0, -1.0])
    _, found = policy_loss("gmpo", log_ratio, torch.zeros(1, 4, dtype=F64), advantage, torch.ones(1, 4))
    assert (found["policy/clip_low"], found["policy/clip_high"]) == (0.25, 0.25)


# VESPO and LUSPO.


@pytest.mark.parametrize("seed", range(3))
def test_vespo_is_the_papers_gradient(seed: int) -> None:
    """−sg(W^k e^{λ(1 − W)}) A log π, mean over tokens; W of the whole answer, also over its rows."""
    logprobs, batch = of_answers(seed)
    tokens = int(batch.mask_RT.sum())

    def formula(x: Tensor) -> Tensor:
        losses = []
        for episode, (advantage, d) in enumerate(zip(ADVANTAGE_N, log_ratios(x.detach(), batch), strict=True)):
            w = math.exp(float(d.sum()))
            k, decay = (2.5, 0.7) if advantage >= 0 else (1.5, 1.2)
            own = batch.mask_RT & (batch.episode_R == episode)[:, None]
            losses.append(-(w**k) * math.exp(decay * (1 - w)) * advantage * x[own].sum())
        return torch.stack(losses).sum() / tokens

    agree("vespo", {"k_pos": 2.5, "lambda_pos": 0.7, "k_neg": 1.5, "lambda_neg": 1.2}, formula, logprobs, batch)


def test_the_weight_of_vespo_by_hand() -> None:
    """W = 2: good 4 e⁻³, bad 8 e⁻². W = ½: good ¼ e^{3/2}, bad ⅛ e. W = 1: 1."""
    log_w = tensor([math.log(2)], [math.log(2)], [-math.log(2)], [-math.log(2)], [0.0])
    zeros, mask = torch.zeros(5, 1, dtype=F64), torch.ones(5, 1)
    x = log_w.clone().requires_grad_()
    loss, metrics = policy_loss("vespo", x, zeros, tensor(1, -1, 1, -1, 1), mask)
    e = math.e
    weights = [4 * e**-3, 8 * e**-2, 0.25 * e**1.5, e / 8, 1.0]
    same(torch.autograd.grad(loss, x)[0][:, 0] * 5, [-weights[0], weights[1], -weights[2], weights[3], -1])
    assert metrics["policy/weight"] == pytest.approx(sum(weights) / 5)


def test_vespo_without_kernel_is_the_policy_gradient() -> None:
    logprobs, batch = of_answers(2)
    off = dict.fromkeys(("k_pos", "lambda_pos", "k_neg", "lambda_neg"), 0.0)
    plain = make("grpo", loss="policy_gradient")
    agree("vespo", off, lambda x: total_loss(plain, x, batch), logprobs, batch)


def test_luspo_is_gspo_times_the_length() -> None:
    logprobs, batch = of_answers(3)

    def formula(x: Tensor) -> Tensor:
        losses = []
        for advantage, d in zip(ADVANTAGE_N, log_ratios(x, batch), strict=True):
            s = d.mean().exp()
            losses.append(-len(d) * torch.minimum(s * advantage, s.clamp(0.9, 1.1) * advantage))
        return torch.stack(losses).mean()

    agree("luspo", {"clip_low": 0.1, "clip_high": 0.1}, formula, logprobs, batch)


# Clip-Cov and KL-Cov.


def covariances(x: Tensor, batch: Batch) -> Tensor:
    """Of the sampled tokens in order, [M]."""
    logprob, advantage = x[batch.mask_RT], batch.advantages_RT[batch.mask_RT]
    return (logprob - logprob.mean()) * (advantage - advantage.mean())


@pytest.mark.parametrize("seed", range(3))
def test_kl_cov_holds_back_the_largest_covariances(seed: int) -> None:
    """5 of 24 tokens: −r A + 0.5 |log r|; the others −r A."""
    logprobs, batch = random_batch(seed, spread=0.8)
    held = covariances(logprobs, batch).topk(int(0.22 * int(batch.mask_RT.sum()))).indices

    def formula(x: Tensor) -> Tensor:
        d = (x - batch.old_logprobs_RT)[batch.mask_RT]
        return (-d.exp() * batch.advantages_RT[batch.mask_RT]).mean() + 0.5 * d[held].abs().sum() / len(d)

    assert len(held) > 2
    agree("kl_cov", {"kl_cov_ratio": 0.22, "kl_cov_coef": 0.5}, formula, logprobs, batch)


@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_leaves_out_all_candidates_if_the_share_is_large(seed: int) -> None:
    logprobs, batch = random_batch(seed, spread=0.8)
    cov, ratio = covariances(logprobs, batch), (logprobs - batch.old_logprobs_RT)[batch.mask_RT].exp()
    advantage = batch.advantages_RT[batch.mask_RT]
    free = torch.where(advantage > 0, ratio <= 1.3, ratio >= 0.7)  # not clipped
    left_out = (cov > 0.0) & (cov < 1.5) & free
    assert 1 < int(left_out.sum()) < len(cov)

    def formula(x: Tensor) -> Tensor:
        r = (x - batch.old_logprobs_RT)[batch.mask_RT].exp()
        loss = -torch.minimum(r * advantage, r.clamp(0.7, 1.3) * advantage)
        return loss[~left_out].sum() / len(r)

    bounds = {"clip_low": 0.3, "clip_high": 0.3, "clip_cov_low": 0.0, "clip_cov_high": 1.5}
    agree("clip_cov", {"clip_cov_ratio": 1.0, **bounds}, formula, logprobs, batch)


def chosen(epoch: int, logprobs: Tensor, batch: Batch, share: float) -> Tensor:
    made = ClipCov(clip_cov_ratio=share, clip_cov_low=0.0, clip_cov_high=1e9, clip_high=1e9)
    found = made.first_pass(outputs(logprobs), replace(batch, epoch=epoch)).chosen_RT
    assert found is not None
    return found


def test_the_choice_of_clip_cov_is_random_and_repeatable() -> None:
    """Out of 2,000 equal candidates 40 are drawn: the same again, others in the next epoch, spread over all places."""
    rng = torch.Generator().manual_seed(0)
    old = -torch.rand(50, 40, generator=rng, dtype=F64)
    ones = torch.ones(50, 40, dtype=torch.bool)
    _, batch = random_batch()
    batch = replace(
        batch, mask_RT=ones, old_logprobs_RT=old, advantages_RT=torch.randn(50, 40, generator=rng, dtype=F64)
    )
    first, again, later = (chosen(epoch, old, batch, 0.02) for epoch in (0, 0, 1))
    assert int(first.sum()) == 40 and torch.equal(first, again) and int((first & later).sum()) < 10
    assert int(first.any(0).sum()) > 15 and int(first.any(1).sum()) > 15


def test_shares_without_a_choice_leave_the_plain_losses() -> None:
    """Nothing in the band of Clip-Cov; a coefficient of 0 in KL-Cov. At least one token is always held back."""
    logprobs, batch = random_batch(5)
    clipped = make("grpo", loss="ppo_clip", aggregation="token-mean", clip_low=1.0, clip_high=1.0, dual_clip=None)
    agree(
        "clip_cov",
        {"clip_cov_low": 1e6, "clip_cov_high": 1e7},
        lambda x: total_loss(clipped, x, batch),
        logprobs,
        batch,
    )
    free = make("grpo", loss="ppo_clip", aggregation="token-mean", clip_low=1e9, clip_high=1e9, dual_clip=None)
    agree("kl_cov", {"kl_cov_coef": 0.0}, lambda x: total_loss(free, x, batch), logprobs, batch)
    metrics = KlCov().metrics(outputs(logprobs), batch)
    assert metrics["cov/held_back"] == pytest.approx(1 / int(batch.mask_RT.sum()))
    assert metrics["cov/mean"] == pytest.approx(float(covariances(logprobs, batch).mean()))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dppo_tv", {"divergence": "js"}, "divergence must be tv or kl, got 'js'"),
        ("dppo_kl", {"ratio_cap": 1.0}, "ratio_cap must be a number above 1"),
        ("gmpo", {"clip_low": -0.1}, "clip_low must be a number from 0"),
        ("vespo", {"k_pos": -1.0}, "k_pos must be a number from 0"),
        ("clip_cov", {"clip_cov_ratio": 1.5}, "clip_cov_ratio must be a number from 0 to 1"),
        ("kl_cov", {"kl_cov_ratio": -0.5}, "kl_cov_ratio must be a number from 0 to 1"),
    ],
)
def test_what_cannot_be_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("grpo", loss=name, **options)


def test_bounds_without_a_covariance_between_them_are_refused() -> None:
    with pytest.raises(InputError, match=r"clip_cov_low=6 is over clip_cov_high=5"):
        make("clip_cov", clip_cov_low=6.0)
