"""GRPO: Group Relative Policy Optimization (the advantage; the loss is `ppo_clip`).

Shao et al. 2024, https://arxiv.org/abs/2402.03300

    A_i = (R_i − R̄) / (σ_R + ε)             over the group; the same for every token of answer i

Deviations: a group of one, or of equal rewards, has advantage 0. `std_normalize=false` leaves σ out, as Dr. GRPO
(https://arxiv.org/abs/2503.20783) does: dividing by σ favours questions that are almost always or almost never solved.
Shapes: N episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from covey.algorithms.ops import group_mean, group_size, group_std
from covey.protocols import Advantages, Needs
from covey.types import Samples


@dataclass(frozen=True, slots=True)
class Grpo:
    std_normalize: bool = True  # divide by the group's standard deviation
    epsilon: float = 1e-6  # added to the standard deviation

    @property
    def needs(self) -> Needs:
        return Needs(min_group_size=2)

    def advantages(self, samples: Samples) -> Advantages:
        rewards_N = samples.total_reward()
        centred_N = rewards_N - group_mean(rewards_N, samples.group_N)
        std_N = group_std(rewards_N, samples.group_N)
        # Where the spread is mere rounding, so is the centred reward.
        centred_N = centred_N * ((std_N > 0) & (group_size(samples.group_N) > 1))
        return Advantages(centred_N / (std_N + self.epsilon) if self.std_normalize else centred_N)
