"""ReMax: REINFORCE with the greedy answer's reward as baseline.

Li et al. 2023, https://arxiv.org/abs/2310.10505

    A_i = R_i − R(greedy answer to the same prompt)

The greedy answer is sampled and scored besides the group and never trained on. Group size 1 is fine, because the
baseline does not come from the group.

Deviations: the loss is averaged over the step's tokens; in the paper it is summed over an answer, which has the same
direction. Shapes: N episodes, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from covey.protocols import Advantages, Needs
from covey.types import Samples


@dataclass(frozen=True, slots=True)
class Remax:
    needs: ClassVar[Needs] = Needs(greedy_baseline=True)

    def advantages(self, samples: Samples) -> Advantages:
        assert samples.baseline_rewards_G is not None, "ReMax needs the reward of a greedy answer to each prompt"
        rewards_N = samples.total_reward()
        baseline_G = samples.baseline_rewards_G.to(rewards_N.dtype)
        greedy = float(baseline_G.mean())
        return Advantages(rewards_N - baseline_G[samples.group_N], metrics={"remax/greedy_reward": greedy})
