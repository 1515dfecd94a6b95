"""Distillation on a softmax policy whose answers can all be enumerated: expected gradients, fixed points.

Answers are two of three tokens; a state is the empty prefix or one of the first tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from covey.algorithms import make
from covey.algorithms.distill import NoRewards, Teacher
from covey.algorithms.ops import make_batch
from covey.learner.logprobs import FullKl
from covey.protocols import Advantages, TokenOutputs
from covey.types import Batch, Sample, Samples

VOCABULARY = 3
ANSWERS = list(itertools.product(range(VOCABULARY), repeat=2))
STATES = [(0, 1 + first) for first, _ in ANSWERS]  # the states of an answer's tokens; state 1 + v is after token v
F64 = torch.float64


def random_logits(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + VOCABULARY, VOCABULARY, dtype=F64, generator=generator)


def token_logprobs(logits_SV: Tensor) -> Tensor:
    """[9 answers, 2 tokens]"""
    log_SV = logits_SV.log_softmax(-1)
    return torch.stack([log_SV[torch.tensor(s), torch.tensor(y)] for s, y in zip(STATES, ANSWERS, strict=True)])


def step(old_RT: Tensor, teacher_RT: Tensor | None) -> tuple[Samples, Batch]:
    rows = tuple(Sample((0,), y, (True, True), (0.0, 0.0), (0, 0), i) for i, y in enumerate(ANSWERS))
    count, mask_RT = len(rows), torch.ones(len(rows), 2, dtype=torch.bool)
    index = torch.arange(count)
    samples = Samples(
        rows, index, {}, {}, torch.full((count,), 2), torch.zeros(count, dtype=torch.bool), index, mask_RT, old_RT,
        teacher_logprobs_RT=teacher_RT,
    )  # fmt: skip
    batch = make_batch(
        rows=rows, group_N=index, rewards_N=torch.zeros(count, dtype=F64), episode_R=index, mask_RT=mask_RT,
        old_logprobs_RT=old_RT, ref_logprobs_RT=None, advantages_RT=torch.zeros_like(old_RT),
    )  # fmt: skip
    return samples, batch


def expected_gradient(logits: Tensor, teacher: Teacher, target: Tensor, rewards_N: Tensor | None = None) -> Tensor:
    """Of the loss, over answers that the policy samples: Σ_y π(y) Σ_t ∇L_t(y)."""
    logits = logits.clone().requires_grad_(True)
    logprobs_RT = token_logprobs(logits)
    samples, batch = step(logprobs_RT.detach(), token_logprobs(target))
    algorithm = replace(make("grpo", aggregation="seq-mean-token-sum"), estimator=NoRewards(), teacher=teacher)
    before = algorithm.estimator.advantages(samples) if rewards_N is None else Advantages(rewards_N)
    batch = replace(batch, advantages_RT=teacher.add_to(before, samples).values)
    kl_RT = None
    if teacher.kl == "full":
        states = torch.tensor(STATES).flatten()
        kl_RT = FullKl.apply(logits[states], target[states]).view(logprobs_RT.shape)
    out = TokenOutputs(logprobs_RT, torch.zeros_like(logprobs_RT), teacher_kl=kl_RT)
    probability_N = logprobs_RT.detach().sum(-1).exp()
    total = (probability_N * algorithm.objective.loss(out, batch).sum(-1)).sum()
    for answer, weight in enumerate(probability_N.tolist()):
        if kl_RT is not None:
            one = replace(batch, mask_RT=torch.zeros_like(batch.mask_RT).index_fill(0, torch.tensor(answer), True))
            total = total + weight * teacher.loss(out, one, algorithm.aggregation)["distill"].sum
    return torch.autograd.grad(total, logits)[0]


def per_state_kl(logits: Tensor, target: Tensor) -> Tensor:
    """Σ_t E[KL(π(·|s_t) ‖ π_T(·|s_t))] with the distribution of the states fixed."""
    p, q = logits.log_softmax(-1), target.log_softmax(-1)
    kl_S = (p.exp() * (p - q)).sum(-1)
    return kl_S[0] + (p[0].exp().detach() * kl_S[1:]).sum()


def answer_kl(logits: Tensor, target: Tensor) -> Tensor:
    p, q = token_logprobs(logits).sum(-1), token_logprobs(target).sum(-1)
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize(
    ("teacher", "objective"),
    [
        (Teacher("sampled", 0.7), per_state_kl),
        (Teacher("full", 0.7), per_state_kl),
        (Teacher("sampled", 0.7, discount=1.0), answer_kl),
    ],
    ids=["sampled", "full", "whole answers"],
)
def test_the_expected_gradient_is_that_of_the_reverse_kl(
    teacher: Teacher, objective: Callable[[Tensor, Tensor], Tensor]
) -> None:
    logits, target = random_logits(0).requires_grad_(True), random_logits(1)
    (expected,) = torch.autograd.grad(0.7 * objective(logits, target), logits)
    assert float(expected.abs().max()) > 0.05
    torch.testing.assert_close(expected_gradient(logits.detach(), teacher, target), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_fixed_points_with_a_reward(discount: float) -> None:
    """discount 1: π ∝ π_T e^{R/β} over answers. discount 0: π(v|s) ∝ π_T(v|s) e^{Q(s,v)/β}, Q under π itself. The
    expected gradient of the policy loss with R − β Σ d vanishes there, and only there."""
    beta, target = 0.4, random_logits(1)
    reward_N = torch.tensor([0.3, -0.5, 1.0, 0.0, 0.8, -0.2, 0.1, 0.6, -0.9], dtype=F64)
    reward_VV = reward_N.view(VOCABULARY, VOCABULARY)
    last = target[1:].log_softmax(-1) + reward_VV / beta
    later = beta * last.logsumexp(-1) if discount else (last.softmax(-1) * reward_VV).sum(-1)
    first = target[0].log_softmax(-1) + later / beta
    optimum = torch.cat([first[None], last]).log_softmax(-1)
    if discount:
        product_N = (token_logprobs(target).sum(-1) + reward_N / beta).log_softmax(-1)
        torch.testing.assert_close(token_logprobs(optimum).sum(-1), product_N)
    gradient, other = (
        expected_gradient(optimum, Teacher("sampled", beta, d), target, reward_N) for d in (discount, 1.0 - discount)
    )
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)
    assert float(other.abs().max()) > 1e-3


def test_advantages_by_hand() -> None:
    """Discounted sums over sampled tokens; rows that the teacher does not score, and masked tokens, get none."""
    old_RT, teacher_RT = torch.tensor([[-1.0, -2.0, -1.0]] * 2), torch.tensor([[-2.0, -9.0, -0.5]] * 2)
    mask_RT = torch.tensor([[True, False, True]] * 2)
    rows = tuple(
        Sample((0,), (1, 1, 1), (True, False, True), (0.0,) * 3, (0,) * 3, i, teacher_prompt_ids=prompt)
        for i, prompt in enumerate([None, ()])
    )
    index = torch.arange(2)
    samples = Samples(rows, index, {}, {}, index, index.bool(), index, mask_RT, old_RT, teacher_logprobs_RT=teacher_RT)
    found = Teacher(coef=2.0, discount=0.5).add_to(Advantages(torch.tensor([0.1, 0.2])), samples)
    # d = (1, −0.5) on the sampled tokens of the first row
    expected = torch.tensor([[0.1 - 2 * (1 - 0.25), 0.1, 0.1 - 2 * -0.5], [0.2, 0.2, 0.2]])
    torch.testing.assert_close(found.values, expected)
    assert found.metrics == {"distill/kl": 0.25, "distill/share": 0.5}
    alone = Teacher(coef=2.0).add_to(Advantages(torch.zeros(2)), samples)
    torch.testing.assert_close(alone.values[0], torch.tensor([-2.0, 0.0, 1.0]))
