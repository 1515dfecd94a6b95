"""RLOO: REINFORCE with a leave-one-out baseline.

Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740

    A_i = R_i − mean_{j≠i} R_j  =  k/(k−1) · (R_i − R̄)

Deviations: the paper puts the KL into the reward (`kl_in=reward`); here kl_coef is 0 unless set. The loss is averaged
over the step's tokens; in the paper it is summed over an answer, which has the same direction. A group of one has no
baseline, and advantage 0. Shapes: N episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from covey.algorithms.ops import centred, group_size
from covey.protocols import Advantages, Needs
from covey.types import Samples


@dataclass(frozen=True, slots=True)
class Rloo:
    needs: ClassVar[Needs] = Needs(min_group_size=2)

    def advantages(self, samples: Samples) -> Advantages:
        rewards_N = samples.total_reward()
        centred_N = centred(rewards_N, samples.group_N)
        size_N = group_size(samples.group_N, rewards_N.dtype)
        return Advantages(size_N / (size_N - 1).clamp(min=1) * centred_N)
