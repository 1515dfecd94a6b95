"""Estimators over turns: turn_returns and gigpo by hand, against loops, and reduced to GRPO; PPO's turn rewards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithms import make
from covey.algorithms.functional import advantages
from covey.algorithms.ops import episode_sum, make_batch, token_rewards, turn_rewards, turns_of
from covey.types import Samples, Turns
from tests.algorithms.helpers import F64, NAN, same, samples_of, tensor, total_loss, value_and_gradient

# One group of three episodes. 0: three turns in one row, with a tool's words between; 1: two turns, forked into two
# rows; 2: one turn.
MASK = [[1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
TURN = [[0, 0, -1, 1, 2], [3, 3, 3, -1, -1], [4, -1, -1, -1, -1], [5, 5, -1, -1, -1]]
EPISODE = [0, 1, 1, 2]


def step(
    paid: Sequence[float] = (NAN,) * 6,
    outcome: Sequence[float] = (0, 0, 0),
    states: Sequence[int] = (0, 1, 2, 0, 1, 0),
    **columns: Any,
) -> Samples:
    turns = Turns(
        episode_K=torch.tensor([0, 0, 0, 1, 1, 2]),
        number_K=torch.tensor([0, 1, 2, 0, 1, 0]),
        reward_K=tensor(*paid),
        state_K=torch.tensor(states),
        turn_RT=torch.tensor(TURN),
    )
    counted = turns.reward_K.nan_to_num(nan=0.0)
    given = tensor(*outcome).index_add(0, turns.episode_K, counted)
    return samples_of(given, [0, 0, 0], mask=MASK, episode=EPISODE, turns=turns, **columns)


def per_turn(found: Tensor) -> list[float]:
    """The advantage of each turn; all its tokens must have it, and tokens that were not sampled 0."""
    values = []
    for turn in range(6):
        (value,) = set(found[torch.tensor(TURN) == turn].tolist())
        values.append(value)
    assert not found[torch.tensor(TURN) < 0].any()
    return values


def test_turn_returns_by_hand() -> None:
    """γ = ½. Episode 0 is paid 1, nothing, 2 and an outcome of 1: G = 1 + ½·3/2, 3/2, 3; episode 1 nothing, 1: ½, 1;
    episode 2 an outcome of 3. At turn 0: 7/4, ½, 3 (mean 7/4), at turn 1: 3/2, 1; turn 2 has no other."""
    samples = step(paid=[1, NAN, 2, NAN, 1, NAN], outcome=[1, 0, 3])
    found = make("turn_returns", gamma=0.5, std_normalize=False).advantages(samples).values
    same(per_turn(found), [0, 0.25, 0, -1.25, -0.25, 1.25])
    scaled = make("turn_returns", gamma=0.5).advantages(samples).values
    # σ at turn 0: √((0 + 25/16 + 25/16)/2) = 5/4; at turn 1: √(2/16) = √2/4
    same(per_turn(scaled), [0, 0.5**0.5, 0, -1, -(0.5**0.5), 1], 1e-5)


def test_gigpo_by_hand() -> None:
    """The same rewards with γ = ½: R = 4, 1, 3. State 0: all turns 0; state 1: both
    turns 1; state 2: turn 2."""
    samples = step(paid=[1, NAN, 2, NAN, 1, NAN], outcome=[1, 0, 3])
    algorithm = make("gigpo", gamma=0.5, step_weight=2.0, std_normalize=False)
    found = algorithm.advantages(samples)
    mean = 8 / 3
    expected = [4 - mean, 4 - mean + 0.5, 4 - mean, 1 - mean - 2.5, 1 - mean - 0.5, 3 - mean + 2.5]
    same(per_turn(found.values), expected)
    assert found.metrics == {"gigpo/state_visits": (3 * 3 + 2 * 2 + 1) / 6, "gigpo/shared_states": 5 / 6}


def test_a_state_visited_twice_by_one_episode_counts_twice() -> None:
    samples = step(paid=[NAN, NAN, 1, NAN, NAN, NAN], states=[0, 0, 1, 2, 3, 4])
    found = make("gigpo", gamma=0.5, std_normalize=False).advantages(samples).values
    # R = 1, 0, 0; in state 0: G = ¼ and ½
    same(per_turn(found), [2 / 3 - 1 / 8, 2 / 3 + 1 / 8, 2 / 3, -1 / 3, -1 / 3, -1 / 3])


def authors_gigpo(
    rewards: list[list[float]], groups: list[int], states: list[list[int]], gamma: float, weight: float, std: bool
) -> list[list[float]]:
    """The paper's equations 3 to 8 as loops over lists (as langfengQ/verl-agent, gigpo/core_gigpo.py, with each episode
    counted once in the episode's statistics)."""

    def normal(values: list[float], value: float) -> float:
        mean = sum(values) / len(values)
        if len(values) == 1 or not std:
            return value - mean
        return (value - mean) / (math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) + 1e-6)

    totals, visited = defaultdict(list), defaultdict(list)
    returns = []
    for own, group, where in zip(rewards, groups, states, strict=True):
        totals[group].append(sum(own))
        returns.append([sum(gamma**i * r for i, r in enumerate(own[t:])) for t in range(len(own))])
        for state, value in zip(where, returns[-1], strict=True):
            visited[group, state].append(value)
    return [
        [
            normal(totals[group], sum(own)) + weight * normal(visited[group, state], value)
            for state, value in zip(where, values, strict=True)
        ]
        for own, group, where, values in zip(rewards, groups, states, returns, strict=True)
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "weight", "std"), [(0.95, 1.0, True), (1.0, 0.5, False), (0.5, 2.0, True)])
def test_gigpo_is_the_authors_formula(seed: int, gamma: float, weight: float, std: bool) -> None:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 5, (12,), generator=rng).tolist()
    rewards = [torch.randn(n, generator=rng, dtype=F64).tolist() for n in lengths]
    states = [torch.randint(0, 3, (n,), generator=rng).tolist() for n in lengths]
    groups = [n % 3 for n in range(12)]
    token = torch.zeros(12, 8, dtype=F64)  # two tokens a turn, its reward on the first
    number = (torch.arange(8) // 2).expand(12, 8)
    mask = number < torch.tensor(lengths)[:, None]
    for row, own in enumerate(rewards):
        token[row, 0 : 2 * len(own) : 2] = tensor(*own)
    found = advantages(
        *("gigpo", token, groups),
        **{"mask": mask, "turns": number, "states": states},
        **{"gamma": gamma, "step_weight": weight, "std_normalize": std},
    )
    expected = torch.zeros(12, 8, dtype=F64)
    for row, own in enumerate(authors_gigpo(rewards, groups, states, gamma, weight, std)):
        expected[row, : 2 * len(own)] = tensor(*own).repeat_interleave(2)
    same(found, expected, 1e-9)


# Reduction to GRPO.


def test_turn_returns_are_grpo_where_only_the_last_turn_pays() -> None:
    """γ = 1: at turns that all episodes of a group reach. With equal numbers of turns: everywhere."""
    rewards, groups = torch.rand(8, dtype=F64), [0] * 4 + [1] * 4
    grpo = advantages("grpo", rewards, groups)
    number = torch.arange(6).expand(8, 6) // 2
    whole = torch.ones(8, 6, dtype=torch.bool)
    last = torch.zeros(8, 6, dtype=F64)
    last[:, -1] = rewards
    found = advantages("turn_returns", last, groups, mask=whole, turns=number)
    same(found, grpo[:, None].expand(8, 6), 1e-9)
    # Group 0 keeps its lengths, in group 1 the episodes have 1, 2, 2 and 3 turns.
    turns = torch.tensor([3, 3, 3, 3, 1, 2, 2, 3])
    mask = number < turns[:, None]
    last = torch.zeros(8, 6, dtype=F64)
    last[torch.arange(8), 2 * turns - 1] = rewards
    found = advantages("turn_returns", last, groups, mask=mask, turns=number)
    same(found[:4], grpo[:4, None].expand(4, 6), 1e-9)
    same(found[4:, :2], grpo[4:, None].expand(4, 2), 1e-9)
    same(found[5:, 2:4], advantages("grpo", rewards[5:], [0] * 3)[:, None].expand(3, 2), 1e-9)
    assert found[7, 4:].tolist() == [0, 0]  # the only one there


@pytest.mark.parametrize("name", ["turn_returns", "gigpo"])
def test_one_turn_each_is_grpo(name: str) -> None:
    rewards, groups = torch.rand(8, dtype=F64), [0] * 4 + [1] * 4
    scale = 2.0 if name == "gigpo" else 1.0  # both of its advantages are then GRPO's
    same(advantages(name, rewards, groups), scale * advantages("grpo", rewards, groups), 1e-9)


def test_gigpo_without_the_states_is_grpo() -> None:
    samples = step(paid=[1, NAN, 2, NAN, 1, NAN], outcome=[1, 0, 3])
    found = make("gigpo", step_weight=0.0).advantages(samples).values
    grpo = make("grpo").advantages(samples).values
    same(per_turn(found), grpo[torch.tensor([0, 0, 0, 1, 1, 2])], 1e-9)


# Rewards of turns.


def test_the_rewards_of_the_turns_sum_to_the_total_reward() -> None:
    shaped = torch.rand(4, 5, dtype=F64)
    samples = step(paid=[1, NAN, 2, NAN, 1, 0], outcome=[1, 0, 3])
    samples = replace(
        samples,
        rewards={**samples.rewards, "overlong": tensor(-0.5, NAN, 0)},
        weights={"reward": 1.0, "overlong": 2.0},
        token_rewards_RT=shaped * samples.mask_RT,
    )
    turns = turns_of(samples)
    found = turn_rewards(samples, turns)
    same(torch.zeros(3, dtype=F64).index_add(0, turns.episode_K, found), samples.total_reward())
    same(found[0], 1 + shaped[0, :2].sum())
    same(found[2], 2 + 1 - 1 + shaped[0, 4])  # paid, the outcome, twice the penalty
    same(token_rewards(samples).sum(), samples.total_reward().sum())


def test_rounding_is_no_reward() -> None:
    """0.1 + 0.2 − 0.3 is not 0 in float32; what is left must not become the last turn's signal."""
    paid = [0.1, 0.2, -0.3, 0.7, -0.7, 0.0]
    samples = step(paid=paid)
    samples = replace(samples, old_logprobs_RT=samples.old_logprobs_RT.float())
    same(turn_rewards(samples, turns_of(samples)), torch.tensor(paid).double(), 1e-12)


def test_token_estimators_pay_a_turn_at_its_last_token() -> None:
    samples = step(paid=[1, 4, 2, NAN, 8, NAN], outcome=[1, 0, 3])
    expected = [[0, 1, 0, 4, 3], [0, 0, 0, 0, 0], [8, 0, 0, 0, 0], [0, 3, 0, 0, 0]]
    assert token_rewards(samples).tolist() == expected
    # Turn 1 of episode 0 is not trained, so its reward is on the token before; the only turn of episode 2 has no token.
    hidden = samples.mask_RT.clone()
    hidden[0, 3] = hidden[3, 0] = hidden[3, 1] = False
    assert token_rewards(replace(samples, mask_RT=hidden)).tolist() == [
        [0, 5, 0, 0, 3],
        *([[0] * 5, [8, 0, 0, 0, 0], [0] * 5]),
    ]
    returns = make("reinforce_plus_plus").advantages(samples).returns
    assert returns is not None
    assert returns[0].tolist() == [8, 8, 0, 7, 3] and returns[1].tolist() == [8, 8, 8, 0, 0]


@pytest.mark.parametrize(("gamma", "turn_gamma", "lam"), [(1.0, 0.9, 1.0), (0.9, 0.5, 0.7), (0.8, 1.0, 0.5)])
def test_gae_over_turns(gamma: float, turn_gamma: float, lam: float) -> None:
    """Against a loop over the tokens of each episode. A turn boundary costs turn_gamma, two of them its square."""
    values = torch.rand(4, 5, dtype=F64)
    samples = step(paid=[1, 4, 2, NAN, 8, NAN], outcome=[1, 0, 3], values_RT=values)
    mask = samples.mask_RT.clone()
    mask[0, 3] = False  # turn 1 of episode 0 is not trained on
    samples = replace(samples, mask_RT=mask)
    rewards = token_rewards(samples)
    found = make("ppo", gamma=gamma, turn_gamma=turn_gamma, lam=lam).advantages(samples).returns
    assert found is not None
    for tokens in ([(0, 0), (0, 1), (0, 4)], [(1, 0), (1, 1), (1, 2), (2, 0)], [(3, 0), (3, 1)]):
        advantage, value, turn = 0.0, 0.0, TURN[tokens[-1][0]][tokens[-1][1]]
        for r, t in reversed(tokens):
            discount = gamma * turn_gamma ** (turn - TURN[r][t])
            own = float(values[r, t])
            advantage = float(rewards[r, t]) + discount * value - own + discount * lam * advantage
            value, turn = own, TURN[r][t]
            same(found[r, t], advantage + own)


# Invariances.


@pytest.mark.parametrize("name", ["turn_returns", "gigpo"])
def test_the_order_of_the_episodes_does_not_matter(name: str) -> None:
    rng = torch.Generator().manual_seed(0)
    rewards, number = torch.randn(8, 6, generator=rng, dtype=F64), torch.arange(6).expand(8, 6) // 2
    mask = number <= torch.randint(0, 3, (8, 1), generator=rng)
    groups, order = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0]), torch.randperm(8, generator=rng)
    states = [[int(s) for s in torch.randint(0, 2, (int(m.sum()) // 2,), generator=rng)] for m in mask]
    found = advantages(name, rewards, groups, mask=mask, turns=number, states=states)
    moved = {"mask": mask[order], "turns": number[order], "states": [states[i] for i in order]}
    same(advantages(name, rewards[order], groups[order], **moved), found[order])


@pytest.mark.parametrize("name", ["turn_returns", "gigpo"])
def test_rows_and_micro_batches_do_not_matter(name: str) -> None:
    """Episode 1 as one row has the same advantages as in two; the loss over micro-batches adds up to the whole."""
    algorithm = make(name)
    samples = step(paid=[1, NAN, 2, NAN, 1, NAN], outcome=[1, 0, 3])
    values = algorithm.advantages(samples).values
    assert samples.turns is not None
    joined = samples_of(
        samples.rewards,
        [0, 0, 0],
        mask=[MASK[0], [1, 1, 1, 0, 1], MASK[3]],
        turns=replace(samples.turns, turn_RT=torch.tensor([TURN[0], [3, 3, 3, -1, 4], TURN[3]])),
    )
    one_row = algorithm.advantages(joined).values
    same(one_row[1], [*values[1, :3], 0, values[2, 0]])
    batch = make_batch(
        rows=(None,) * 4,  # type: ignore[arg-type]
        group_N=samples.group_N,
        rewards_N=samples.total_reward(),
        episode_R=samples.episode_R,
        mask_RT=samples.mask_RT,
        old_logprobs_RT=samples.old_logprobs_RT,
        ref_logprobs_RT=None,
        advantages_RT=values,
        max_tokens=5,
    )
    logprobs = 0.1 * torch.randn(4, 5, dtype=F64)
    told = replace(batch, policy_sum_N=episode_sum(logprobs, batch.mask_RT, batch.episode_R, 3))

    def split(x: Tensor, parts: Sequence[Sequence[int]]) -> Tensor:
        return torch.stack([total_loss(algorithm, x[list(part)], told.take(part)) for part in parts]).sum()

    whole = value_and_gradient(lambda x: total_loss(algorithm, x, batch), logprobs)
    for parts in ([[0, 1], [2, 3]], [[3], [1], [0, 2]]):
        found = value_and_gradient(partial(split, parts=parts), logprobs)
        same(found[0], whole[0])
        same(found[1], whole[1])


def test_masked_turns_count_in_the_baseline_but_have_no_advantage() -> None:
    """truncated=mask: an episode that was cut off stays in its group's statistics."""
    samples = step(paid=[1, NAN, 2, NAN, 1, NAN], outcome=[1, 0, 3], truncated_N=torch.tensor([True, False, False]))
    for name in ("turn_returns", "gigpo"):
        kept = make(name).advantages(samples).values
        algorithm = make(name, truncated="mask")
        masked, _ = algorithm.shape(samples)
        found = algorithm.advantages(masked).values
        same(found, kept * masked.mask_RT)
        assert not found[0].any() and found[1].any()


def test_a_kl_in_the_reward_counts_for_its_turn() -> None:
    samples = step(paid=[0, 0, 0, 0, 0, 0], ref_logprobs_RT=torch.zeros(4, 5, dtype=F64))
    samples = replace(samples, old_logprobs_RT=torch.arange(20, dtype=F64).view(4, 5) / 10)
    algorithm = make("turn_returns", kl_coef=0.5, kl_in="reward", gamma=0.0, std_normalize=False)
    shaped, _ = algorithm.shape(samples)
    kl = -0.5 * samples.old_logprobs_RT * samples.mask_RT  # k1
    first = [kl[0, :2].sum(), kl[1].sum(), kl[3].sum()]
    found = per_turn(algorithm.advantages(shaped).values)
    same([found[0], found[3], found[5]], tensor(*first) - tensor(*first).mean())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"turns= has shape \(2, 3\)"):
        advantages("turn_returns", tensor(1, 0), [0, 0], mask=torch.ones(2, 2), turns=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="one entry for each turn"):
        advantages(
            *("gigpo", tensor(1, 0), [0, 0]),
            **{"mask": torch.ones(2, 2), "turns": torch.tensor([[0, 1], [0, 0]]), "states": [["a"], ["a"]]},
        )
