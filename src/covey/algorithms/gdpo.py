"""GDPO: Group reward-Decoupled normalisation Policy Optimization, for several rewards at once.

Liu et al. 2026, https://arxiv.org/abs/2601.05242

    A_n,i = (r_n,i − mean_g r_n) / (σ_g(r_n) + ε)          for each reward n by itself, over the group g
    A_i   = Σ_n w_n A_n,i                                   w_n: reward.weights
    Â_i   = (A_i − mean A) / (σ(A) + ε)                     over all episodes of the step

Normalising the sum instead, as GRPO does, gives many different mixtures of rewards the same advantage.

Deviations: the last step normalises over episodes, not tokens: over tokens a group without signal would get an
advantage. A missing reward (None) does not count in that reward's statistics; an episode without any reward has
advantage 0. A reward of weight 0 is only logged. Shapes: N episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from covey.algorithms.ops import group_std, normalised
from covey.imports import torch
from covey.protocols import Advantages, Metrics, Needs
from covey.ranges import Epsilon, check_ranges
from covey.types import Samples

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gdpo:
    needs: ClassVar[Needs] = Needs(min_group_size=2)
    columns: ClassVar[bool] = True  # reads the named rewards, so the KL cannot be in the reward

    epsilon: Epsilon = 1e-6  # added to standard deviations

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")

    def advantages(self, samples: Samples) -> Advantages:
        weights = {name: samples.weights[name] for name in trained(samples)}
        return Advantages(combined(samples, weights, self.epsilon), metrics=reward_metrics(samples))


def trained(samples: Samples) -> list[str]:
    """The rewards with a weight other than 0."""
    return [name for name in samples.rewards if samples.weights[name] != 0]


def combined(samples: Samples, weights: Mapping[str, float], epsilon: float) -> Tensor:
    """Â of each episode."""
    total_N = torch.zeros_like(samples.total_reward())
    scored_N = torch.zeros_like(total_N, dtype=torch.bool)
    for name, weight in weights.items():
        column_N = samples.rewards[name].to(total_N.dtype)
        given_N = ~column_N.isnan()
        total_N = total_N + weight * normalised(column_N.nan_to_num(nan=0.0), samples.group_N, epsilon, given_N)
        scored_N |= given_N
    one_group_N = torch.zeros_like(samples.group_N)  # the whole step
    return normalised(total_N, one_group_N, epsilon, scored_N)


def reward_metrics(samples: Samples) -> Metrics:
    metrics: Metrics = {}
    for name, column_N in samples.rewards.items():
        scored_N = ~column_N.isnan()
        if not bool(scored_N.any()):
            continue
        values = column_N[scored_N].double()
        zero_std_N = group_std(column_N.double().nan_to_num(nan=0.0), samples.group_N, scored_N) == 0
        zero_std = {int(g): bool(z) for g, z in zip(samples.group_N, zero_std_N, strict=True)}
        metrics |= {
            f"gdpo/{name}/mean": float(values.mean()),
            f"gdpo/{name}/std": float(values.std(unbiased=False)),
            f"gdpo/{name}/min": float(values.min()),
            f"gdpo/{name}/max": float(values.max()),
            f"gdpo/{name}/frac_zero_std": sum(zero_std.values()) / len(zero_std),
        }
    return metrics
