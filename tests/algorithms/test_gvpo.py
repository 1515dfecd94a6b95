"""GVPO against its theory, in float64 on softmax policies over a handful of answers.

With one-token answers the sequence log-prob is log π(a), so a policy is a vector of logits and every expectation can be
enumerated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithms import make
from covey.algorithms.functional import GVPOLoss, advantages, compute_gvpo_advantage, policy_loss
from covey.algorithms.gvpo import Gvpo
from tests.algorithms.helpers import F64, outputs, random_batch, same, tensor

BETA = 0.5
REWARD = tensor(1.0, 0.2, -0.5, 0.0)
ANCHOR = torch.log_softmax(tensor(0.3, -0.2, 0.1, 0.8), -1)


def optimum(anchor: Tensor, beta: float) -> Tensor:
    """π* ∝ π' e^{R/β}"""
    return torch.softmax(anchor + REWARD / beta, -1)


def gradient_at(logits: Tensor, counts: Sequence[int], anchor: Tensor, **options: Any) -> Tensor:
    """Of Covey's loss in the logits, for one group that holds each answer as often as `counts` says: in proportion to
    the sampling distribution, so that the group's means are the expectations."""
    answers = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    x = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(x, -1)[answers][:, None]
    loss = GVPOLoss(beta=BETA, **options)(logprobs, anchor[answers][:, None], REWARD[answers], [0] * len(answers))
    return torch.autograd.grad(loss, x)[0]


def minimise(counts: Sequence[int], anchor: Tensor) -> Tensor:
    """Descend along the loss's gradient until it vanishes."""
    logits = torch.zeros(4, dtype=F64)
    for _ in range(2000):
        gradient = gradient_at(logits, counts, anchor)
        logits = logits - 6.0 * gradient
        if float(gradient.abs().max()) < 1e-11:
            break
    return torch.softmax(logits, -1)


@pytest.mark.parametrize("counts", [(5, 5, 5, 5), (14, 2, 2, 2), (1, 3, 6, 10)])
def test_any_full_support_sampling_reaches_the_optimum(counts: tuple[int, ...]) -> None:
    same(minimise(counts, ANCHOR), optimum(ANCHOR, BETA), 1e-8)


def test_with_gradient_through_the_weight_the_optimum_would_be_another() -> None:
    """Undetached, −βΣ q w log π is stationary at π'^½ e^{R/2β}. Covey's loss is not: it is so at π* alone."""
    half = torch.log_softmax(ANCHOR / 2 + REWARD / (2 * BETA), -1).requires_grad_()
    ratio = torch.log_softmax(half, -1) - ANCHOR
    weight = (REWARD - REWARD.mean()) - BETA * (ratio - ratio.mean())
    (undetached,) = torch.autograd.grad(-BETA * (weight * torch.log_softmax(half, -1)).mean(), half)
    same(undetached, torch.zeros(4))
    assert float(gradient_at(half.detach(), (5, 5, 5, 5), ANCHOR).abs().max()) > 1e-3
    same(gradient_at(optimum(ANCHOR, BETA).log(), (5, 5, 5, 5), ANCHOR), torch.zeros(4))


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
    for n in (1, 2):
        policy = minimise((5, 5, 5, 5), policy).log()
        same(policy.exp(), torch.softmax(ANCHOR + n * REWARD / BETA, -1), 1e-7)


def test_the_anchor_is_the_start_model_or_the_sampling_policy() -> None:
    logprobs, reference, rewards, mask, groups = random_group_batch(2)
    old = logprobs + 0.1 * torch.randn_like(logprobs)
    centred = advantages("gvpo", rewards, groups)
    initial, _ = policy_loss("gvpo", logprobs, old, centred, mask, groups=groups, ref_logprobs=reference)
    same(initial, GVPOLoss()(logprobs, reference, rewards, groups, mask))
    last, _ = policy_loss("gvpo", logprobs, old, centred, mask, groups=groups, reference="old")
    same(last, GVPOLoss()(logprobs, old, rewards, groups, mask))
    assert abs(float(initial - last)) > 1e-4


def test_at_the_sampling_policy_it_is_centred_reinforce() -> None:
    """With reference=old and no update since, ρ ≡ 0: the gradient is −β/(k−1) (R − R̄) on every sampled token."""
    logprobs, _, rewards, mask, groups = random_group_batch(3)
    centred = advantages("gvpo", rewards, groups)
    x = logprobs.clone().requires_grad_()
    policy_loss("gvpo", x, logprobs, centred, mask, groups=groups, reference="old", beta=0.2)[0].backward()
    size = tensor(*[3.0 if g == "a" else 4.0 for g in groups])
    same(x.grad, (-0.2 / (size - 1) * centred / 2)[:, None] * mask)


def test_metrics_by_hand() -> None:
    """Two groups of two: R − R̄ = ±½ and ±1, ρ − ρ̄ = ±0.3 and 0, β = 0.1: w = ±0.47 and ±1."""
    logprobs, reference = tensor([-1.0], [-2.0], [-1.0], [-1.0]), tensor([-1.2], [-1.6], [-1.1], [-1.1])
    centred = tensor(0.5, -0.5, 1.0, -1.0)
    loss, found = policy_loss(
        "gvpo", logprobs, logprobs, centred, torch.ones(4, 1), groups="aabb", ref_logprobs=reference, beta=0.1
    )
    expected = {
        "gvpo/loss": float(loss),
        "gvpo/alone": 0.0,
        "gvpo/empty": 0.0,
        "gvpo/mean_reward": 0.0,
        "gvpo/mean_weight": 0.0,
        "gvpo/std_weight": ((0.47**2 + 1) / 2) ** 0.5,
        "gvpo/max_weight": 1.0,
        "gvpo/min_weight": -1.0,
        "gvpo/mean_log_ratio": 0.0,
        "gvpo/std_log_ratio": ((0.04 + 0.16 + 0.01 + 0.01) / 4) ** 0.5,
        # Of the four answers: √(2 · 0.3²) and 0; √(2 · 0.5²) and √2.
        "gvpo/pull": 0.1 * 0.3 * 2**0.5 / 2,
        "gvpo/reward_spread": (0.5 * 2**0.5 + 2**0.5) / 2,
    }
    assert found == pytest.approx(expected, abs=1e-12)


def test_pull_and_spread_are_of_the_same_groups() -> None:
    """A group of one and an empty answer count in neither; every other group counts once, whatever its size."""
    logprobs, reference = tensor([-1.0], [-2.0], [-3.0], [-1.0], [-1.0], [0.0]), tensor([0.0]).expand(6, 1)
    rewards = tensor(1.0, 0.0, 2.0, 5.0, 4.0, 9.0)
    mask = torch.tensor([[1], [1], [1], [1], [1], [0]])
    common = {"groups": ["a", "a", "a", "b", "c", "c"], "ref_logprobs": reference, "beta": 0.5}
    _, found = policy_loss("gvpo", logprobs, logprobs, rewards, mask, **common)
    assert (found["gvpo/pull"], found["gvpo/reward_spread"]) == pytest.approx((0.5, 1.0))  # group a alone
    common["groups"] = ["a", "a", "a", "b", "b", "c"]
    _, found = policy_loss("gvpo", logprobs, logprobs, rewards, mask, **common)
    assert (found["gvpo/pull"], found["gvpo/reward_spread"]) == pytest.approx((0.25, (1 + 0.5**0.5) / 2))


def test_at_the_optimum_the_pull_equals_the_spread_of_the_rewards() -> None:
    """βρ = R − constant there, and with the sampling policy as anchor the first update has no pull."""
    logprobs = torch.log(optimum(ANCHOR, BETA))[:, None]
    mask, common = torch.ones(4, 1), {"groups": [0] * 4, "beta": BETA}
    _, found = policy_loss("gvpo", logprobs, logprobs, REWARD, mask, ref_logprobs=ANCHOR[:, None], **common)
    assert found["gvpo/pull"] == pytest.approx(found["gvpo/reward_spread"]) == pytest.approx(float(REWARD.std()))
    _, first = policy_loss("gvpo", logprobs, logprobs, REWARD, mask, reference="old", **common)
    assert first["gvpo/pull"] == 0 < first["gvpo/reward_spread"]


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
        ({"ref_logprobs": None, "reference": "initial"}, "needs ref_logprobs"),
        ({"aggregation": "token-mean"}, "sums over tokens by its theory"),
        ({"beta": 0.0}, "beta must be a number above 0"),
        ({"reference": "yesterday"}, "old, initial or moving"),
        ({"reference": "moving", "reference_every": 0}, "reference_every must be a whole number"),
        ({"clip_weight": -1.0}, "clip_weight"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(arguments: dict[str, object], message: str) -> None:
    zeros = torch.zeros(2, 1)
    call: dict[str, object] = {"groups": [0, 0], "ref_logprobs": zeros} | arguments
    with pytest.raises(ValueError, match=message):
        policy_loss("gvpo", zeros, zeros, torch.zeros(2), torch.ones(2, 1), **call)  # type: ignore[arg-type]


def test_reference_log_probs_that_are_passed_are_the_anchor() -> None:
    logprobs, reference, rewards, mask, groups = random_group_batch()
    old = logprobs + 0.1
    found = [
        policy_loss("gvpo", logprobs, old, rewards, mask, groups=groups, **options)[1]["gvpo/std_log_ratio"]
        for options in ({"ref_logprobs": reference}, {"ref_logprobs": reference, "reference": "old"}, {})
    ]
    ratio = [((logprobs - anchor) * mask).sum(-1).std(unbiased=False) for anchor in (reference, old, old)]
    assert found == pytest.approx([float(std) for std in ratio])


def test_the_loss_of_a_token_is_its_weight_times_its_log_prob() -> None:
    """Forked rows: every token of an episode has the weight that its sum over all rows gives."""
    logprobs, batch = random_batch()
    episode, reward = batch.episode_R.tolist(), batch.rewards_N
    rho = torch.zeros(7, dtype=F64)
    assert batch.ref_logprobs_RT is not None
    for row, number in enumerate(episode):
        rho[number] += ((logprobs - batch.ref_logprobs_RT) * batch.mask_RT)[row].sum()
    expected = torch.zeros(7, dtype=F64)
    for members in ([0, 1], [2, 3, 4], [5, 6]):
        centred = (reward[members] - reward[members].mean()) - 0.3 * (rho[members] - rho[members].mean())
        expected[members] = -0.3 * centred / (len(members) - 1)
    same(Gvpo(beta=0.3, reference="initial").loss(outputs(logprobs), batch), expected[episode][:, None] * logprobs)


def test_it_advises_more_than_two_answers() -> None:
    needs = make("gvpo").needs
    assert (needs.min_group_size, needs.advised_group_size) == (2, 4)
    assert make("gvpo").couples == "groups"
