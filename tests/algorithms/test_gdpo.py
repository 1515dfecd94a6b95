"""GDPO: how many mixtures of rewards it tells apart, rewards that were not given, and its batch step."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from covey.algorithms import make
from covey.algorithms.functional import advantages
from covey.algorithms.gdpo import combined
from tests.algorithms.helpers import F64, NAN, same, samples_of, tensor


def every_group(answers: int, rewards: int) -> tuple[Tensor, Tensor]:
    """All groups that differ by more than the order of their answers, as one step: binary rewards [N, K], and groups.
    An answer is one of 2^K kinds, and a group a multiset of kinds."""
    kinds = list(itertools.product([0.0, 1.0], repeat=rewards))
    groups = list(itertools.combinations_with_replacement(range(len(kinds)), answers))
    return tensor(*kinds)[torch.tensor(groups)].flatten(0, 1), torch.arange(len(groups)).repeat_interleave(answers)


def distinct(advantages_N: Tensor, answers: int) -> int:
    """How many different groups there are, whatever the order of their answers."""
    sorted_GN = advantages_N.reshape(-1, answers).sort(-1)[0]
    return len(set(map(tuple, (sorted_GN * 1e5).round().tolist())))


def counts(answers: int, rewards: int) -> tuple[int, int]:
    """Of GDPO, and of GRPO on the sum. The batch step scales all groups of the step alike, so it changes no count."""
    columns, group_N = every_group(answers, rewards)
    table = {f"r{k}": columns[:, k] for k in range(rewards)}
    samples = samples_of(table, group_N)
    ours = combined(samples, dict.fromkeys(table, 1.0), epsilon=1e-12)
    grpo = advantages("grpo", columns.sum(-1), group_N, epsilon=1e-12)
    return distinct(ours, answers), distinct(grpo, answers)


def test_it_distinguishes_more_mixtures_of_two_rewards_than_grpo() -> None:
    found = [counts(n, 2) for n in range(2, 12)]
    assert [gdpo for gdpo, _ in found] == [3, 6, 14, 26, 38, 59, 81, 109, 145, 186]
    assert [grpo for _, grpo in found] == [2, 4, 7, 11, 16, 22, 29, 37, 46, 56]


def test_and_more_so_of_more_rewards() -> None:
    found = [counts(4, rewards) for rewards in range(2, 6)]
    assert [gdpo for gdpo, _ in found] == [14, 45, 127, 318]
    assert [grpo for _, grpo in found] == [7, 14, 23, 41]


def test_by_hand() -> None:
    """right 1, 0, 0, 0 → 1.5, −½ ×3;  short 0, 0, 1, 1 → ∓√3/2.  With weights 1 and 2 they are added, and divided by
    their standard deviation over the step (their mean is 0)."""
    rewards = {"right": tensor(1, 0, 0, 0), "short": tensor(0, 0, 1, 1)}
    root = math.sqrt(3) / 2
    added = tensor(1.5 - 2 * root, -0.5 - 2 * root, -0.5 + 2 * root, -0.5 + 2 * root)
    found = advantages("gdpo", rewards, [0] * 4, weights={"short": 2.0})
    same(found, added / added.std(), 1e-5)


def test_the_batch_step_runs_over_all_episodes_with_epsilon() -> None:
    # groups 1, −1 and 4, 0 with ε = 1: stds √2 and 2√2
    first, second = 1 / (math.sqrt(2) + 1), 2 / (2 * math.sqrt(2) + 1)
    raw = tensor(first, -first, second, -second)
    found = advantages("gdpo", {"only": tensor(1, -1, 4, 0)}, [0, 0, 1, 1], epsilon=1.0)
    same(found, raw / (raw.std() + 1))


def test_a_missing_reward_does_not_count_in_its_statistics() -> None:
    """`b` was given to two of three answers: those are compared with each other, and the third has `a` alone."""
    rewards = {"a": tensor(1, 0, 2), "b": tensor(NAN, 4, 0)}
    raw = tensor(0, -1, 1) + tensor(0, 1, -1) / math.sqrt(2)
    same(advantages("gdpo", rewards, [0, 0, 0]), raw / raw.std(), 1e-5)


def test_an_answer_without_any_reward_has_advantage_zero_and_does_not_count() -> None:
    rewards = {"a": tensor(1, 0, NAN, 5, 2), "b": tensor(0, 3, NAN, NAN, 1)}
    found = advantages("gdpo", rewards, [0, 0, 0, 1, 1])
    assert found[2] == 0
    without = {name: column[[0, 1, 3, 4]] for name, column in rewards.items()}
    same(found[[0, 1, 3, 4]], advantages("gdpo", without, [0, 0, 1, 1]))


def test_weights_go_by_name_and_weight_zero_is_measured_only() -> None:
    right, short = tensor(1, 0, 0, 1), tensor(0, 3, 1, 1)
    alone = advantages("gdpo", {"right": right}, [0] * 4)
    samples = samples_of({"short": short, "right": right}, [0] * 4, weights={"short": 0.0})
    found = make("gdpo").advantages(samples)
    same(found.values, alone)
    assert found.metrics["gdpo/short/mean"] == 1.25
    swapped = advantages("gdpo", {"short": short, "right": right}, [0] * 4, weights={"right": 3.0})
    same(swapped, advantages("gdpo", {"right": right, "short": short}, [0] * 4, weights={"short": 1.0, "right": 3.0}))


def test_weight_zero_of_the_only_reward_of_an_answer_leaves_it_without() -> None:
    rewards = {"a": tensor(1, 0, NAN), "b": tensor(0, 0, 7)}
    assert advantages("gdpo", rewards, [0, 0, 0], weights={"b": 0.0})[2] == 0


def test_a_group_without_signal_has_advantage_zero_whatever_the_lengths() -> None:
    """Whitened over tokens, the mean would not be 0, and the zero-variance group would get an advantage."""
    mask = torch.arange(9) < torch.tensor([1, 9, 2, 8, 3, 7])[:, None]
    rewards = {"a": tensor(1, 0, 3, 0.1, 0.1, 0.1), "b": tensor(0, 0, 1, 1, 1, 1)}
    found = advantages("gdpo", rewards, [0, 0, 0, 1, 1, 1], mask=mask)
    same(found[3:], [0, 0, 0])
    assert float(found[:3].abs().min()) > 0.1


def test_each_reward_counts_alike_whatever_its_scale() -> None:
    torch.manual_seed(0)
    rewards, groups = {"a": torch.rand(8, dtype=F64), "b": torch.rand(8, dtype=F64)}, torch.arange(8) // 4
    before = advantages("gdpo", rewards, groups, epsilon=1e-12)
    scaled = {"a": 1000 * rewards["a"] - 5, "b": rewards["b"]}
    same(advantages("gdpo", scaled, groups, epsilon=1e-12), before, 1e-8)


def test_metrics_by_hand() -> None:
    samples = samples_of({"a": [1, 0, 0.1, 0.1, NAN], "b": [NAN] * 5}, [0, 0, 1, 1, 2])
    found = make("gdpo").advantages(samples).metrics
    expected = {
        "gdpo/a/mean": 0.3,
        "gdpo/a/std": math.sqrt((0.49 + 0.09 + 0.04 + 0.04) / 4),
        "gdpo/a/min": 0.0,
        "gdpo/a/max": 1.0,
        "gdpo/a/frac_zero_std": 2 / 3,
    }
    assert found == pytest.approx(expected)
