"""Estimators over an episode's tokens (GAE, REINFORCE++) against a plain loop over lists, and the critic's loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithms import make
from covey.algorithms.functional import advantages
from covey.algorithms.gae import Gae, explained_variance, value_loss
from covey.protocols import Advantages
from covey.types import Samples
from tests.algorithms.helpers import F64, NAN, TOKEN_ESTIMATORS, same, samples_of, tensor

# Four episodes as seven rows that lie in no order: 0 and 2 are forked, 1 has a tool's words inside, 3 sampled nothing.
MASK = [
    [1, 1, 0, 1, 0],
    [1, 0, 0, 1, 1],
    [1, 1, 1, 0, 0],
    [0, 1, 0, 0, 0],
    [0, 0, 0, 0, 0],
    [1, 0, 1, 0, 1],
    [1, 1, 0, 0, 0],
]
EPISODE = [2, 1, 0, 2, 3, 0, 2]
REWARDS = [1.0, -0.5, 2.0, 3.0]


def forked_step(*, shaped: bool = True) -> Samples:
    """With a critic's values and shapers' token rewards; what lies under no mask must not count."""
    rng = torch.Generator().manual_seed(0)
    hidden = ~torch.tensor(MASK, dtype=torch.bool)
    values, added = (torch.randn(hidden.shape, generator=rng, dtype=F64) for _ in range(2))
    return samples_of(
        REWARDS,
        [0, 0, 1, 1],
        mask=MASK,
        episode=EPISODE,
        values_RT=values.masked_fill(hidden, 1e9),
        token_rewards_RT=added.masked_fill(hidden, 1e9) if shaped else None,
    )


def by_loop(samples: Samples, step: Callable[[float, float, float, float], tuple[float, float]]) -> list[list[float]]:
    """Each episode from its last sampled token to its first. `step` makes of a token's reward and value, the value of
    the token after it and what was carried from there: what the token gets, and what is carried on."""
    added, values = samples.token_rewards_RT, samples.values_RT
    assert values is not None
    found = [[0.0] * len(row) for row in MASK]
    for episode in range(samples.episodes):
        order = [(r, t) for r, row in enumerate(MASK) if EPISODE[r] == episode for t, on in enumerate(row) if on]
        carried = after = 0.0
        for number, (r, t) in enumerate(reversed(order)):
            reward = 0.0 if added is None else float(added[r, t])
            if number == 0:
                reward += REWARDS[episode]
            found[r][t], carried = step(reward, float(values[r, t]), after, carried)
            after = float(values[r, t])
    return found


def whitened(rows: list[list[float]]) -> list[list[float]]:
    """Mean 0 and unbiased variance 1 over the sampled tokens of the whole step."""
    tokens = [x for row, on in zip(rows, MASK, strict=True) for x, o in zip(row, on, strict=True) if o]
    mean = sum(tokens) / len(tokens)
    std = math.sqrt(sum((x - mean) ** 2 for x in tokens) / (len(tokens) - 1) + 1e-8)
    return [[(x - mean) / std * o for x, o in zip(row, on, strict=True)] for row, on in zip(rows, MASK, strict=True)]


@pytest.mark.parametrize("shaped", [True, False])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (0.95, 1.0), (1.0, 0.0), (0.0, 0.5)])
def test_gae(gamma: float, lam: float, shaped: bool) -> None:
    def step(reward: float, value: float, after: float, carried: float) -> tuple[float, float]:
        advantage = reward + gamma * after - value + gamma * lam * carried
        return advantage, advantage

    def with_value(reward: float, value: float, after: float, carried: float) -> tuple[float, float]:
        advantage, _ = step(reward, value, after, carried)
        return advantage + value, advantage

    samples = forked_step(shaped=shaped)
    found = make("ppo", gamma=gamma, lam=lam).advantages(samples)
    assert found.returns is not None
    same(found.values, whitened(by_loop(samples, step)))
    same(found.returns, by_loop(samples, with_value))


@pytest.mark.parametrize("gamma", [1.0, 0.8, 0.0])
def test_reinforce_plus_plus(gamma: float) -> None:
    def step(reward: float, value: float, after: float, carried: float) -> tuple[float, float]:
        total = reward + gamma * carried
        return total, total

    samples = forked_step()
    found = make("reinforce_plus_plus", gamma=gamma).advantages(samples)
    assert found.returns is not None
    same(found.returns, by_loop(samples, step))
    same(found.values, whitened(by_loop(samples, step)))


def test_reinforce_baseline_counts_every_episode_as_often_as_it_has_tokens() -> None:
    """Its token rewards are summed per episode, the group mean is subtracted, and tokens are whitened."""
    samples = forked_step()
    total = samples.total_reward()
    centred = total - tensor(*[total[:2].mean()] * 2, *[total[2:].mean()] * 2)
    expected = whitened([[float(centred[e])] * 5 for e in EPISODE])
    found = make("reinforce_plus_plus_baseline").advantages(samples).values
    assert found[3] == 0  # sampled nothing
    same(found[torch.tensor(EPISODE)][:, None] * torch.tensor(MASK), expected)


def test_by_hand() -> None:
    """Rewards 0, 1; values ½, ¼; γ = ½, λ = ½: δ₁ = 1 − ¼ = ¾, δ₀ = ⅛ − ½ = −⅜, A₀ = −⅜ + ¼·¾ = −3/16."""
    found, returns = advantages(
        "ppo", tensor(1), [0], mask=torch.ones(1, 2), values=tensor([0.5, 0.25]), gamma=0.5, lam=0.5, with_returns=True
    )
    same(returns, [[5 / 16, 1.0]])
    same(found, [[-(0.5**0.5), 0.5**0.5]], 1e-6)


def test_with_lambda_one_the_critic_only_shifts_the_return() -> None:
    """A + V is then the plain discounted return, whatever the critic says."""
    samples = forked_step()
    plain = make("reinforce_plus_plus", gamma=0.9).advantages(samples).returns
    same(make("ppo", gamma=0.9, lam=1.0).advantages(samples).returns, plain)


@pytest.mark.parametrize("name", TOKEN_ESTIMATORS)
def test_equal_advantages_are_whitened_to_zero(name: str) -> None:
    mask, values = torch.tensor([[1, 1], [1, 0]]), torch.zeros(2, 2, dtype=F64)
    for reward in (0.1, 1e6):
        rewards = torch.full((2,), reward, dtype=F64)
        options: dict[str, Any] = {"values": values} if make(name).needs.values else {}
        assert advantages(name, rewards, [0, 1], mask=mask, **options).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", TOKEN_ESTIMATORS)
def test_the_order_of_the_answers_does_not_matter(name: str) -> None:
    torch.manual_seed(0)
    rewards, values, mask = torch.rand(6, dtype=F64), torch.rand(6, 4, dtype=F64), torch.rand(6, 4) < 0.6
    order = torch.randperm(6)
    options: dict[str, Any] = {"values": values} if make(name).needs.values else {}
    moved = {key: column[order] for key, column in options.items()}
    found = advantages(name, rewards, range(6), mask=mask, **options)
    same(advantages(name, rewards[order], range(6), mask=mask[order], **moved), found[order])


def test_garbage_under_no_mask_never_counts() -> None:
    """NaN in a critic's values where nothing was sampled."""
    samples = forked_step()
    hidden = ~samples.mask_RT
    assert samples.values_RT is not None and samples.token_rewards_RT is not None
    dirty = samples_of(
        REWARDS,
        [0, 0, 1, 1],
        mask=MASK,
        episode=EPISODE,
        values_RT=samples.values_RT.masked_fill(hidden, NAN),
        token_rewards_RT=samples.token_rewards_RT,
    )
    for name in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo"):
        same(make(name).advantages(dirty).values, make(name).advantages(samples).values)


def test_a_critic_is_needed() -> None:
    with pytest.raises(ValueError, match="ppo needs values="):
        advantages("ppo", tensor(1.0), [0])
    with pytest.raises(ValueError, match="gamma must be a number from 0 to 1"):
        make("ppo", gamma=1.1)
    with pytest.raises(ValueError, match="lam must be a number from 0 to 1"):
        make("ppo", lam=-0.1)
    assert make("ppo").needs.values and make("ppo").needs.min_group_size == 1
    assert make("reinforce_plus_plus").needs.min_group_size == 1


def test_metrics_of_the_critic() -> None:
    samples = forked_step()
    found: Advantages = Gae().advantages(samples)
    assert samples.values_RT is not None and found.returns is not None
    v, g = samples.values_RT[samples.mask_RT], found.returns[samples.mask_RT]
    assert found.metrics["value/mean"] == pytest.approx(float(v.mean()))
    assert found.metrics["value/returns_mean"] == pytest.approx(float(g.mean()))
    assert found.metrics["value/explained_variance"] == pytest.approx(1 - float((g - v).var() / g.var()))


def test_explained_variance_by_hand() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    returns = tensor([1, 3, NAN], [5, NAN, NAN])  # variance 8/3
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full((2, 3), 7.0), returns, mask) == pytest.approx(0.0)
    # errors 1, 0, −1: variance 2/3
    assert explained_variance(tensor([0, 3, 9], [6, 9, 9]), returns, mask) == pytest.approx(0.75)
    assert explained_variance(returns, torch.ones(2, 3), mask) == 0.0  # nothing to explain
    assert explained_variance(returns, returns, torch.zeros(2, 3, dtype=torch.bool)) == 0.0


@pytest.mark.parametrize(
    ("value", "returns", "loss", "slope"),
    [
        (1.1, 2.0, 0.81 / 2, -0.9),  # within ±0.2 of the old value, 1
        (1.5, 2.0, 0.64 / 2, 0.0),  # moved too far towards the return: clipped at 1.2
        (0.5, 2.0, 2.25 / 2, -1.5),  # moved too far away from it: 1.5² is worse than the clipped 1.2²
        (2.5, 1.9, 0.49 / 2, 0.0),  # beyond the return: |0.6| counts less than the clipped |0.7|
        (2.9, 1.9, 1.00 / 2, 1.0),  # far beyond it: |1.0| counts more
    ],
)
def test_value_loss_by_hand(value: float, returns: float, loss: float, slope: float) -> None:
    at = torch.tensor(value, dtype=F64, requires_grad=True)
    found = value_loss(at, tensor(1.0)[0], tensor(returns)[0], 0.2)
    (gradient,) = torch.autograd.grad(found, at)
    same(found.detach(), loss)
    same(gradient, slope)


def test_value_loss_without_a_clip_is_half_the_squared_error() -> None:
    at = tensor(1.5, -3.0).requires_grad_()
    found = value_loss(at, tensor(1.0, 1.0), tensor(2.0, 0.0), None)
    (gradient,) = torch.autograd.grad(found.sum(), at)
    same(found.detach(), [0.125, 4.5])
    same(gradient, [-0.5, -3.0])


def test_a_perfect_critic_leaves_no_advantage() -> None:
    """V_t = the return from t on: every δ is 0."""
    values: Tensor = tensor([2.0, 2.0, 2.0])
    found, returns = advantages(
        "ppo", tensor(2.0), ["only"], mask=torch.ones(1, 3), values=values, with_returns=True, lam=0.7
    )
    same(found, [[0, 0, 0]])
    same(returns, [[2, 2, 2]])
