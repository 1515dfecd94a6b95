"""GPG: Group Policy Gradient, the plain gradient with a correction for answers without reward.

Chu et al. 2025, https://arxiv.org/abs/2504.02546

    A_i = α (R_i − R̄),    α = answers of the step / answers with a reward other than 0

Answers without reward dilute the mean over the batch; α undoes the dilution.

Deviations: α counts answers with a reward, as public implementations do; the paper counts the answers of groups that
are neither all correct nor all wrong. A group of one has advantage 0. Shapes: N episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from covey.algorithms.ops import centred
from covey.protocols import Advantages, Needs
from covey.types import Samples


@dataclass(frozen=True, slots=True)
class Gpg:
    needs: ClassVar[Needs] = Needs(min_group_size=2)

    def advantages(self, samples: Samples) -> Advantages:
        rewards_N, group_N = samples.total_reward(), samples.group_N
        alpha = len(rewards_N) / max(int((rewards_N != 0).sum()), 1)
        return Advantages(alpha * centred(rewards_N, group_N), metrics={"gpg/alpha": alpha})
