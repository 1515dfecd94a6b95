"""GRPO: Group Relative Policy Optimization (the advantage; the loss is `ppo_clip`).

Shao et al. 2024, https://arxiv.org/abs/2402.03300

    A_i = (R_i − R̄) / (σ_R + ε)             over the group; the same for every token of answer i

Deviations: a group of one, or of equal rewards, has advantage 0. `std_normalize=false` omits σ, as Dr. GRPO
(https://arxiv.org/abs/2503.20783) does: dividing by σ favours questions that are almost always or almost never solved.
`std_over=batch` divides by the σ of all rewards of the step (Liu et al. 2025, https://arxiv.org/abs/2508.08221).
Shapes: N episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from covey.algorithms.ops import centred, group_std, normalised
from covey.imports import torch
from covey.protocols import Advantages, Needs
from covey.ranges import Epsilon, check_ranges
from covey.types import Samples

TINY = 1e-30  # if no reward differs and ε is 0, the advantage is 0 / TINY


@dataclass(frozen=True, slots=True)
class Grpo:
    needs: ClassVar[Needs] = Needs(min_group_size=2)

    std_normalize: bool = True  # divide by the group's standard deviation
    std_over: str = "group"  # group | batch: the standard deviation of all rewards of the step
    epsilon: Epsilon = 1e-6  # added to the standard deviation

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")
        if self.std_over not in ("group", "batch"):
            raise ValueError(f"algorithm.std_over must be group or batch, got {self.std_over!r}")

    def advantages(self, samples: Samples) -> Advantages:
        rewards_N, group_N = samples.total_reward(), samples.group_N
        if not self.std_normalize:
            return Advantages(centred(rewards_N, group_N))
        if self.std_over == "group":
            return Advantages(normalised(rewards_N, group_N, self.epsilon))
        std_N = group_std(rewards_N, torch.zeros_like(group_N))
        return Advantages(centred(rewards_N, group_N) / (std_N + self.epsilon).clamp(min=TINY))
