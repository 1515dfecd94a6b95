"""Group statistics, whitening, an episode's tokens in time order, and the projection onto weights with a floor."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from covey.algorithms.ops import (
    backward_sum,
    effective_sample_size,
    episode_sum,
    from_timeline,
    group_mean,
    group_size,
    group_std,
    normalised,
    probability_ratio,
    simplex_with_floor,
    timeline,
    to_timeline,
    token_rewards,
    whiten,
)
from tests.algorithms.helpers import F64, NAN, same, samples_of, tensor

GROUPS = torch.tensor([0, 1, 0, 1, 0, 2])
VALUES = tensor(1.0, 5.0, 2.0, 9.0, 6.0, 4.0)


def test_statistics_of_each_group_are_given_back_to_its_members() -> None:
    same(group_size(GROUPS), [3, 2, 3, 2, 3, 1])
    same(group_mean(VALUES, GROUPS), [3, 7, 3, 7, 3, 4])
    # variances: ((−2)² + (−1)² + 3²)/2 = 7 and (2² + 2²)/1 = 8
    same(group_std(VALUES, GROUPS), [7**0.5, 8**0.5, 7**0.5, 8**0.5, 7**0.5, 0])


def test_invalid_members_do_not_count_in_any_statistic() -> None:
    valid = torch.tensor([True, True, True, True, False, False])
    same(group_size(GROUPS, valid_N=valid), [2, 2, 2, 2, 2, 0])
    same(group_mean(VALUES, GROUPS, valid), [1.5, 7, 1.5, 7, 1.5, 0])
    same(group_std(VALUES, GROUPS, valid), [0.5**0.5, 8**0.5, 0.5**0.5, 8**0.5, 0.5**0.5, 0])
    found = normalised(VALUES, GROUPS, 0.5, valid)
    same(found, [-0.5 / (0.5**0.5 + 0.5), -2 / (8**0.5 + 0.5), 0.5 / (0.5**0.5 + 0.5), 2 / (8**0.5 + 0.5), 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("value", [0.1, 0.3, 1e6, -7.7, 1e-9])
def test_a_spread_within_rounding_is_no_spread(value: float, dtype: torch.dtype) -> None:
    """Seven 0.1s have a mean that is not 0.1; a division by ε would make an advantage of it."""
    x, one_group = torch.full((7,), value, dtype=dtype), torch.zeros(7, dtype=torch.int64)
    assert group_std(x, one_group).tolist() == [0.0] * 7
    assert normalised(x, one_group, 1e-6).tolist() == [0.0] * 7
    assert whiten(x, torch.ones(7)).tolist() == [0.0] * 7


def test_a_small_spread_of_small_values_is_one() -> None:
    x = tensor(1e-9, 2e-9)
    same(group_std(x, torch.zeros(2, dtype=torch.int64)) * 1e9, [0.5**0.5] * 2)


def test_whitening_over_tokens_by_hand() -> None:
    # tokens 1, 3, 8: mean 4, variance (9 + 1 + 16)/2 = 13
    x = torch.tensor([[1.0, 3.0, NAN], [8.0, 100.0, NAN]], dtype=F64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    expected = tensor([-3, -1, 0], [4, 0, 0]) / (13 + 1e-8) ** 0.5
    same(whiten(x, mask), expected)


def test_whitening_of_episodes_counts_each_as_often_as_it_has_tokens() -> None:
    x, tokens = tensor(2.0, -1.0, 5.0), torch.tensor([3, 1, 0])
    spelled_out = whiten(tensor(2.0, 2.0, 2.0, -1.0), torch.ones(4))
    same(whiten(x, tokens), [*spelled_out[[0, 3]], 0.0])


def test_sums_over_an_episode_take_all_its_rows_and_only_sampled_tokens() -> None:
    x = torch.tensor([[1.0, NAN], [10.0, 20.0], [100.0, 200.0]], dtype=F64)
    mask = torch.tensor([[1, 0], [1, 1], [0, 1]], dtype=torch.bool)
    same(episode_sum(x, mask, torch.tensor([1, 0, 1]), 3), [30, 201, 0])


# Episode 0 has rows 1 and 4 with a tool's words in row 1; episode 2 has rows 0 and 3; episode 1 sampled nothing.
FORKED_MASK = [[1, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]
FORKED_EPISODE = [2, 0, 1, 2, 0]


def test_time_runs_across_tool_turns_and_forked_rows() -> None:
    mask, episode = torch.tensor(FORKED_MASK, dtype=torch.bool), torch.tensor(FORKED_EPISODE)
    places, valid = timeline(mask, episode, 3)
    assert [row[on].tolist() for row, on in zip(places, valid, strict=True)] == [[4, 7, 16, 17, 18], [], [0, 1, 12]]
    x = torch.arange(20, dtype=F64).reshape(5, 4)
    same(to_timeline(x, places, valid), [[4, 7, 16, 17, 18], [0] * 5, [0, 1, 12, 0, 0]])
    same(from_timeline(to_timeline(x, places, valid), places, valid, mask), x * mask)


def test_a_step_without_any_sampled_token_has_an_empty_timeline() -> None:
    places, valid = timeline(torch.zeros(2, 3, dtype=torch.bool), torch.tensor([0, 1]), 2)
    assert places.shape == valid.shape == (2, 0)


def test_the_reward_is_on_the_last_sampled_token_plus_token_rewards() -> None:
    added = torch.arange(20, dtype=F64).reshape(5, 4) / 100 * torch.tensor(FORKED_MASK)
    samples = samples_of(
        [10.0, 20.0, 30.0], [0, 0, 0], mask=FORKED_MASK, episode=FORKED_EPISODE, token_rewards_RT=added
    )
    expected = added.clone()
    expected[4, 2] += 10
    expected[3, 0] += 30
    same(token_rewards(samples), expected)


def test_discounted_sums_run_backwards() -> None:
    same(backward_sum(tensor([1.0, 2.0, 4.0], [0.0, 0.0, 8.0]), 0.5), [[3, 4, 4], [2, 4, 8]])


def test_ratios_are_clamped_before_exp_overflows() -> None:
    found = probability_ratio(tensor(0.0, 1.0, 500.0, -500.0), tensor(0.0, 0.5, 0.0, 0.0))
    same(found, torch.exp(tensor(0.0, 0.5, 20.0, -20.0)))


def test_effective_sample_size() -> None:
    assert effective_sample_size(tensor(1.0, 2.0)) == pytest.approx(0.9)
    assert effective_sample_size(torch.ones(5)) == pytest.approx(1.0)
    assert effective_sample_size(tensor(0.0, 0.0, 0.0, 7.0)) == pytest.approx(0.25)
    assert effective_sample_size(tensor(0.0, 0.0)) == effective_sample_size(torch.zeros(0)) == 0.0


def test_projection_by_hand() -> None:
    # 0.9, 0.08, 0.02 with floor 0.15: two are held, and the rest goes to the first
    same(simplex_with_floor([0.9, 0.08, 0.02], 0.15), [0.7, 0.15, 0.15])
    # 0.5, 0.4, 0.1 with floor 0.2: one is held, the others are lowered by the same 0.05
    same(simplex_with_floor([0.5, 0.4, 0.1], 0.2), [0.45, 0.35, 0.2])
    same(simplex_with_floor([0.5, 0.3, 0.2], 0.1), [0.5, 0.3, 0.2])


@pytest.mark.parametrize(
    ("weights", "floor"), [([0.7, 0.3], 0.5), ([0.2, 0.3, 0.5], 1 / 3), ([0.9] + [0.1 / 9] * 9, 0.1), ([1.0], 1.0)]
)
def test_a_floor_that_leaves_no_room_makes_the_weights_uniform(weights: list[float], floor: float) -> None:
    same(simplex_with_floor(weights, floor), [1 / len(weights)] * len(weights))


def random_weights(rng: random.Random) -> tuple[list[float], float]:
    raw = [rng.random() ** rng.choice([1, 4, 16]) + 1e-12 for _ in range(rng.randint(1, 6))]
    return [w / sum(raw) for w in raw], rng.choice([0.0, rng.random(), 0.999]) / len(raw)


def test_projection_is_the_nearest_point() -> None:
    """KKT: at the nearest point all weights above the floor moved by one amount, and those at the floor by no less."""
    rng = random.Random(0)
    for _ in range(2000):
        weights, floor = random_weights(rng)
        found = simplex_with_floor(weights, floor)
        assert sum(found) == pytest.approx(1, abs=1e-12)
        assert min(found) >= floor
        raised = [f - w for f, w in zip(found, weights, strict=True)]
        free = [r for r, f in zip(raised, found, strict=True) if f > floor + 1e-12]
        assert max(free) - min(free) < 1e-12
        assert all(r >= max(free) - 1e-12 for r in raised)


def test_no_point_of_a_grid_is_nearer_than_the_projection() -> None:
    rng, steps = random.Random(1), 60
    for _ in range(20):
        weights, floor = random_weights(rng)
        if len(weights) != 3:
            continue
        free = 1 - 3 * floor
        grid = [
            [floor + free * i / steps, floor + free * j / steps, floor + free * (steps - i - j) / steps]
            for i, j in itertools.product(range(steps + 1), repeat=2)
            if i + j <= steps
        ]

        def distance(point: list[float], weights: list[float] = weights) -> float:
            return sum((p - w) ** 2 for p, w in zip(point, weights, strict=True))

        assert distance(simplex_with_floor(weights, floor)) <= min(map(distance, grid)) + 1e-12
