"""OPO: On-Policy RL with the Optimal reward baseline.

Hao et al. 2025, https://arxiv.org/abs/2505.23585

    A_i = R_i − b,    b = Σ_j l_j R_j / Σ_j l_j             l_j: tokens of answer j; over the group

The baseline of least gradient variance weighs each reward by the squared gradient norm of its answer, which grows with
its length. Meant for strictly on-policy updates without clipping, KL or entropy terms.

Deviations: a group of one has advantage 0. Shapes: N episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from covey.algorithms.ops import group_std, group_sum
from covey.protocols import Advantages, Needs
from covey.types import Samples


@dataclass(frozen=True, slots=True)
class Opo:
    needs: ClassVar[Needs] = Needs(min_group_size=2)

    def advantages(self, samples: Samples) -> Advantages:
        rewards_N, group_N = samples.total_reward(), samples.group_N
        length_N = samples.lengths().to(rewards_N.dtype)
        baseline_N = group_sum(length_N * rewards_N, group_N) / group_sum(length_N, group_N).clamp(min=1)
        return Advantages((rewards_N - baseline_N) * (group_std(rewards_N, group_N) > 0))
