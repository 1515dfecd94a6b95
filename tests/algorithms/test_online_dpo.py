"""Online DPO: the preference loss of the pair, by hand and by autograd of the formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from covey.algorithms import make
from covey.algorithms.functional import advantages, policy_loss
from covey.types import Batch
from tests.algorithms.helpers import F64, outputs, random_batch, same, tensor, total_loss, value_and_gradient


def by_formula(x: Tensor, batch: Batch, beta: float) -> Tensor:
    """For each group, the mean over its pairs of a best and a worst answer; then the mean over groups."""
    assert batch.ref_logprobs_RT is not None
    h = [
        (x - batch.ref_logprobs_RT)[batch.mask_RT & (batch.episode_R == episode)[:, None]].sum()
        for episode in range(len(batch.group_N))
    ]
    losses = []
    for group in range(int(batch.group_N.max()) + 1):
        members = (batch.group_N == group).nonzero()[:, 0].tolist()
        rewards = [float(batch.rewards_N[i]) for i in members]
        pairs = [
            -logsigmoid(beta * (h[i] - h[j]))
            for i, high in zip(members, rewards, strict=True)
            for j, low in zip(members, rewards, strict=True)
            if high == max(rewards) and low == min(rewards) and high > low
        ]
        losses.append(torch.stack(pairs).mean() if pairs else torch.zeros((), dtype=F64))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rewards", [None, [1.0, 0.0, 1.0, 1.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.1, 0.1, 0.1, 1.0, 0.0]])
def test_value_and_gradient_are_the_formulas(rewards: list[float] | None, seed: int) -> None:
    """Without ties, with several best answers, and with groups of equal rewards; forked rows."""
    logprobs, batch = random_batch(seed, **({} if rewards is None else {"rewards_N": tensor(*rewards)}))
    algorithm = make("online_dpo", beta=0.7)
    found = value_and_gradient(lambda x: total_loss(algorithm, x, batch), logprobs)
    expected = value_and_gradient(lambda x: by_formula(x, batch, 0.7), logprobs)
    same(found[0], expected[0])
    same(found[1], expected[1])


def test_a_pair_by_hand() -> None:
    """h = log 2 and −log 2 with β = 1: margin log 4, loss log(1 + ¼), slope ∓(1 − 4/5)."""
    x = tensor([math.log(0.5), math.log(0.4)], [math.log(0.1), math.log(0.2)]).requires_grad_()
    ref = tensor([math.log(0.25), math.log(0.4)], [math.log(0.2), math.log(0.2)])
    loss, metrics = policy_loss(
        "online_dpo", x, x.detach(), tensor(1, 0), torch.ones(2, 2), groups=[0, 0], ref_logprobs=ref, beta=1.0
    )
    same(loss, math.log(1.25))
    same(torch.autograd.grad(loss, x)[0], [[-0.2, -0.2], [0.2, 0.2]])
    assert metrics["dpo/margin"] == pytest.approx(math.log(4)) and metrics["dpo/pairs"] == 1.0


def test_at_the_reference_it_is_half_beta_times_the_advantages() -> None:
    """Where h = 0, −∂L/∂h = β/2 · (1/best − 1/worst), averaged over groups."""
    rewards, groups = tensor(3, 1, 3, 2, 5, 4), [0, 0, 0, 0, 1, 1]
    pair = advantages("online_dpo", rewards, groups)
    same(pair, [0.5, -1, 0.5, 0, 1, -1])
    at, mask = torch.zeros(6, 2, dtype=F64).requires_grad_(), torch.ones(6, 2)
    loss, _ = policy_loss("online_dpo", at, at.detach(), pair, mask, groups=groups, ref_logprobs=at.detach())
    same(loss, math.log(2))
    same(torch.autograd.grad(loss, at)[0], (-0.1 / 2 * pair / 2)[:, None].expand(6, 2))


def test_an_answer_without_tokens_is_in_no_pair() -> None:
    """The best of three answers was masked: the pair is of the other two."""
    logprobs, mask = torch.zeros(3, 1, dtype=F64), torch.tensor([[0], [1], [1]])
    given = {"groups": [0, 0, 0], "ref_logprobs": tensor([5], [1], [0])}
    loss, _ = policy_loss("online_dpo", logprobs, logprobs, tensor(9, 1, 0), mask, beta=1.0, **given)
    same(loss, math.log(1 + math.exp(1)))


def test_metrics_count_the_groups_of_the_micro_batch() -> None:
    logprobs, batch = random_batch(rewards_N=tensor(1, 0, 0.1, 0.1, 0.1, 1, 0))
    algorithm = make("online_dpo")
    assert algorithm.metrics(outputs(logprobs), batch)["dpo/pairs"] == pytest.approx(2 / 3)
    rows = [2, 3, 5, 1, 4, 8]  # of groups 0 and 1, of which only the first has a pair
    assert algorithm.metrics(outputs(logprobs[rows]), batch.take(rows))["dpo/pairs"] == pytest.approx(0.5)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="kl_coef does not go with online_dpo\n  the preference loss contains the KL"):
        make("online_dpo", kl_coef=0.1)
    with pytest.raises(ValueError, match="correction does not go with online_dpo\n  a preference holds"):
        make("online_dpo", correction="token")
    with pytest.raises(ValueError, match="loss=online_dpo does not go with algorithm=grpo\n  its loss compares"):
        make("grpo", loss="online_dpo")
    with pytest.raises(ValueError, match="needs ref_logprobs="):
        zeros = torch.zeros(2, 1)
        policy_loss("online_dpo", zeros, zeros, zeros[:, 0], zeros, groups=[0, 0])
