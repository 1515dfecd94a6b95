"""GVPO against its theory, in float64 on softmax policies over a handful of answers.

With one-token answers the sequence log-prob is log π(a), so a policy is a vector of logits and every expectation can be
enumerated.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from covey.algorithms.functional import GVPOLoss, advantages, compute_gvpo_advantage, policy_loss
from covey.algorithms.gvpo import Gvpo

BETA = 0.5
REWARD = torch.tensor([1.0, 0.2, -0.5, 0.0], dtype=torch.float64)
ANCHOR = torch.log_softmax(torch.tensor([0.3, -0.2, 0.1, 0.8], dtype=torch.float64), -1)


def optimum(anchor: Tensor, beta: float) -> Tensor:
    """π* ∝ π' e^{R/β}"""
    return torch.softmax(anchor + REWARD / beta, -1)


def population_loss(logits: Tensor, behaviour: Tensor, anchor: Tensor, *, detached: bool) -> Tensor:
    """GVPO's loss with the group replaced by the whole sampling distribution: weights of probability, not counts."""
    logprobs = torch.log_softmax(logits, -1)
    ratio = logprobs - anchor
    weight = (REWARD - behaviour @ REWARD) - BETA * (ratio - behaviour @ ratio)
    return -BETA * (behaviour * (weight.detach() if detached else weight) * logprobs).sum()


def minimise(behaviour: Tensor, *, detached: bool) -> Tensor:
    """Descend along the loss's gradient until it vanishes."""
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    for _ in range(4000):
        (gradient,) = torch.autograd.grad(population_loss(logits, behaviour, ANCHOR, detached=detached), logits)
        with torch.no_grad():
            logits -= 4.0 * gradient
        if float(gradient.abs().max()) < 1e-13:
            break
    return torch.softmax(logits.detach(), -1)


@pytest.mark.parametrize("behaviour", [[0.25] * 4, [0.7, 0.1, 0.1, 0.1], [0.05, 0.15, 0.3, 0.5]])
def test_any_full_support_sampling_reaches_the_optimum(behaviour: list[float]) -> None:
    found = minimise(torch.tensor(behaviour, dtype=torch.float64), detached=True)
    torch.testing.assert_close(found, optimum(ANCHOR, BETA), atol=1e-8, rtol=0)


def test_with_gradient_through_the_weight_the_optimum_is_another() -> None:
    """Undetached, −βΣ q w log π is stationary at π'^½ e^{R/2β}: the reason for the stop-gradient."""
    behaviour = torch.full((4,), 0.25, dtype=torch.float64)
    half = torch.log_softmax(ANCHOR / 2 + REWARD / (2 * BETA), -1).requires_grad_()
    (at_half,) = torch.autograd.grad(population_loss(half, behaviour, ANCHOR, detached=False), half)
    torch.testing.assert_close(at_half, torch.zeros_like(at_half), atol=1e-12, rtol=0)
    best = optimum(ANCHOR, BETA).log().requires_grad_()
    (at_optimum,) = torch.autograd.grad(population_loss(best, behaviour, ANCHOR, detached=False), best)
    assert float(at_optimum.abs().max()) > 1e-3


def test_bessel_makes_the_group_variance_unbiased() -> None:
    """Enumerating all groups of 3: E[Σ(d − d̄)²/(k−1)] = Var(d), for d = βρ − R; with our loss doing the sum."""
    behaviour = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    logits = torch.tensor([0.5, -1.0, 0.2, 0.4], dtype=torch.float64)
    logprobs = torch.log_softmax(logits, -1)
    difference = BETA * (logprobs - ANCHOR) - REWARD
    variance = behaviour @ difference**2 - (behaviour @ difference) ** 2
    expected = torch.zeros((), dtype=torch.float64)
    for group in itertools.product(range(4), repeat=3):
        picked = torch.tensor(group)
        weight = Gvpo(beta=BETA).weights((logprobs - ANCHOR)[picked], REWARD[picked], torch.zeros(3, dtype=torch.int64))
        expected += behaviour[picked].prod() * (weight**2).sum() / 2
    torch.testing.assert_close(expected, variance, atol=1e-12, rtol=0)


def random_group_batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, list[str]]:
    torch.manual_seed(seed)
    logprobs = -torch.rand(7, 5, dtype=torch.float64)
    reference = -torch.rand(7, 5, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([5, 3, 1, 4, 2, 5, 3])[:, None]
    return logprobs, reference, torch.randn(7, dtype=torch.float64), mask, ["a", "a", "b", "b", "b", "b", "a"]


def test_both_forms_of_the_loss_have_the_same_gradient() -> None:
    """−β/(k−1) Σ sg(w) s  and  ½ Σ [(βρ − sg(mean βρ)) − (R − R̄)]²/(k−1), averaged over groups."""
    logprobs, reference, rewards, mask, groups = random_group_batch()
    first = logprobs.clone().requires_grad_()
    GVPOLoss(beta=0.3)(first, reference, rewards, groups, mask).backward()
    second = logprobs.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for name in ("a", "b"):
        here = torch.tensor([g == name for g in groups])
        rho = ((second - reference) * mask).sum(-1)[here]
        centred = rewards[here] - rewards[here].mean()
        total = total + 0.5 * ((0.3 * rho - (0.3 * rho).mean().detach() - centred) ** 2).sum() / (here.sum() - 1)
    (total / 2).backward()
    torch.testing.assert_close(first.grad, second.grad, atol=1e-12, rtol=0)


def test_invariant_to_a_constant_in_the_reward_and_to_a_shift_of_the_ratio() -> None:
    """The partition function cancels: neither R + c nor a per-prompt shift of log π' changes the gradient."""
    logprobs, reference, rewards, mask, groups = random_group_batch(1)
    shift = torch.tensor([2.0 if g == "a" else -3.0 for g in groups], dtype=torch.float64)
    shifted = reference.clone()
    shifted[:, 0] += shift
    gradients = []
    for ref, r in ((reference, rewards), (reference, rewards + shift), (shifted, rewards)):
        x = logprobs.clone().requires_grad_()
        GVPOLoss(beta=0.3)(x, ref, r, groups, mask).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(gradients[2], gradients[0], atol=1e-12, rtol=0)


def test_anchoring_at_the_last_policy_sharpens_round_by_round() -> None:
    """π' ← π each round gives π_n ∝ π_0 e^{nR/β}."""
    policy = ANCHOR
    for _ in range(3):
        policy = optimum(policy, BETA).log()
    torch.testing.assert_close(policy.exp(), torch.softmax(ANCHOR + 3 * REWARD / BETA, -1), atol=1e-12, rtol=0)
    # and that each round's target is where GVPO's gradient vanishes:
    x = policy.clone().requires_grad_()
    before = optimum(optimum(ANCHOR, BETA).log(), BETA).log()
    (gradient,) = torch.autograd.grad(
        population_loss(x, torch.full((4,), 0.25, dtype=torch.float64), before, detached=True), x
    )
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)


def test_weight_by_hand() -> None:
    # R − R̄ = ±0.5;  ρ = [0.2, −0.4], ρ̄ = −0.1, ρ − ρ̄ = ±0.3
    weight = compute_gvpo_advantage(
        torch.tensor([1.0, 0.0]), torch.tensor([-1.0, -2.0]), torch.tensor([-1.2, -1.6]), [0, 0], beta=0.1
    )
    torch.testing.assert_close(weight, torch.tensor([0.47, -0.47]))


def test_loss_by_hand() -> None:
    """Same numbers: L = −β/(k−1) Σ w s = −0.1 · (0.47·(−1) + (−0.47)·(−2)) = −0.047."""
    loss = GVPOLoss(beta=0.1)(
        torch.tensor([[-1.0], [-2.0]]), torch.tensor([[-1.2], [-1.6]]), torch.tensor([1.0, 0.0]), [0, 0]
    )
    assert float(loss) == pytest.approx(-0.047)
    biased = GVPOLoss(beta=0.1, use_bessel_correction=False)
    half = biased(torch.tensor([[-1.0], [-2.0]]), torch.tensor([[-1.2], [-1.6]]), torch.tensor([1.0, 0.0]), [0, 0])
    assert float(half) == pytest.approx(-0.0235)


def test_advantages_are_centred_rewards_without_the_beta_term() -> None:
    found = advantages("gvpo", torch.tensor([1.0, 0.0, 0.0, 0.0, 3.0, 5.0]), ["x"] * 4 + ["y"] * 2)
    torch.testing.assert_close(found, torch.tensor([0.75, -0.25, -0.25, -0.25, -1.0, 1.0]))


def test_clipped_weights_still_sum_to_zero() -> None:
    rewards, zeros = torch.tensor([10.0, 0.0, 0.0, 0.0]), torch.zeros(4)
    clipped = compute_gvpo_advantage(rewards, zeros, zeros, [0] * 4, clip_weight=1.0)
    # 7.5, −2.5 ×3 → 1, −1 ×3 → mean −0.5 → 1.5, −0.5 ×3
    torch.testing.assert_close(clipped, torch.tensor([1.5, -0.5, -0.5, -0.5]))
    raw = compute_gvpo_advantage(rewards, zeros, zeros, [0] * 4, clip_weight=1.0, normalize_weights=False)
    torch.testing.assert_close(raw, torch.tensor([1.0, -1.0, -1.0, -1.0]))


def test_a_group_of_one_has_no_loss_and_uneven_groups_divide_by_their_own_size() -> None:
    logprobs = torch.tensor([[-1.0], [-2.0], [-3.0], [-1.5]], requires_grad=True)
    loss, metrics = policy_loss(
        "gvpo",
        logprobs,
        logprobs.detach(),
        torch.tensor([0.0, 2 / 3, -1 / 3, -1 / 3]),
        torch.ones(4, 1),
        groups=["one", "three", "three", "three"],
        reference="old",
        beta=0.2,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    # the group of three: −β/(k−1)·w = −0.1·[2/3, −1/3, −1/3], averaged over two groups
    torch.testing.assert_close(gradient[:, 0], torch.tensor([0.0, -0.1 / 3, 0.1 / 6, 0.1 / 6]))
    assert metrics["gvpo/alone"] == 0.25


def test_equal_rewards_still_pull_towards_the_anchor() -> None:
    weight = compute_gvpo_advantage(
        torch.tensor([1.0, 1.0]), torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0]), [0, 0], beta=0.5
    )
    torch.testing.assert_close(weight, torch.tensor([-0.5, 0.5]))


def test_an_empty_answer_does_not_count() -> None:
    logprobs = torch.tensor([[-1.0], [-2.0], [0.0]], requires_grad=True)
    mask = torch.tensor([[1], [1], [0]])
    groups = ["g"] * 3
    loss, metrics = policy_loss(
        "gvpo", logprobs, logprobs.detach(), torch.tensor([0.5, -0.5, 9.0]), mask, groups=groups, reference="old"
    )
    pair, _ = policy_loss(
        "gvpo", logprobs[:2], logprobs[:2].detach(), torch.tensor([0.5, -0.5]), mask[:2], groups="gg", reference="old"
    )
    torch.testing.assert_close(loss, pair)
    assert metrics["gvpo/empty"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": None}, "pass groups="),
        ({"ref_logprobs": None}, "needs ref_logprobs"),
        ({"aggregation": "token-mean"}, "sums over tokens by its theory"),
        ({"beta": 0.0}, "beta must be positive"),
        ({"reference": "yesterday"}, "initial or old"),
        ({"clip_weight": -1.0}, "clip_weight"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(arguments: dict[str, object], message: str) -> None:
    zeros = torch.zeros(2, 1)
    call: dict[str, object] = {"groups": [0, 0], "ref_logprobs": zeros} | arguments
    with pytest.raises(ValueError, match=message):
        policy_loss("gvpo", zeros, zeros, torch.zeros(2), torch.ones(2, 1), **call)  # type: ignore[arg-type]
