"""GRPO for pass@k: only the best answer of a group is reinforced, by its margin over the second best.

Tang et al. 2025, https://arxiv.org/abs/2503.19595

    A_best = (R_best − R_second) / (σ_R + ε),    all others 0

If a task counts as solved when any of k attempts solves it, a second solution adds nothing.

Deviations: among equal best answers the first is taken; its advantage is then 0 in any case. A group of one has
advantage 0. Shapes: N episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from covey.algorithms.ops import group_std
from covey.imports import torch
from covey.protocols import Advantages, Needs
from covey.ranges import Epsilon, check_ranges
from covey.types import Samples


@dataclass(frozen=True, slots=True)
class GrpoPassk:
    needs: ClassVar[Needs] = Needs(min_group_size=2)

    std_normalize: bool = True  # divide by the group's standard deviation
    epsilon: Epsilon = 1e-6  # added to the standard deviation

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")

    def advantages(self, samples: Samples) -> Advantages:
        rewards_N, group_N = samples.total_reward(), samples.group_N
        margin_N = torch.zeros_like(rewards_N)
        for number in range(samples.groups):
            members = (group_N == number).nonzero()[:, 0]
            if len(members) > 1:
                best, second = rewards_N[members].topk(2)[0]
                margin_N[members[rewards_N[members].argmax()]] = best - second
        std_N = group_std(rewards_N, group_N)
        scaled_N = margin_N / (std_N + self.epsilon) if self.std_normalize else margin_N
        return Advantages(torch.where(std_N > 0, scaled_N, torch.zeros_like(margin_N)))
