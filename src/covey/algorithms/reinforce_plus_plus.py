"""REINFORCE++: returns normalised over the whole batch, without a critic or group; and its variant with a baseline.

Hu et al. 2025, https://arxiv.org/abs/2501.03262

    G_t = r_t + γ G_{t+1}                     over an episode's sampled tokens in time order
    A_t = (G_t − mean G) / std G              over all tokens of the step

    with baseline:  A_i = whitened(R_i − R̄)   R̄ over the group, whitened over all tokens of the step

An episode's reward is on its last sampled token, a reward that a turn received on the turn's last one; time runs
across tool turns and forked rows. Group size 1 is fine without the baseline; with it, a group of one has R − R̄ = 0.

Deviations: the paper has a KL in the reward (`kl_in=reward`), and with the baseline in the loss (k2); here kl_coef is 0
unless set.
Shapes: N episodes, L tokens of the longest, R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from covey.algorithms.ops import backward_sum, centred, from_timeline, timeline, to_timeline, token_rewards, whiten
from covey.protocols import Advantages, Needs
from covey.ranges import Share, check_ranges
from covey.types import Samples


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus:
    needs: ClassVar[Needs] = Needs(turns=True)

    gamma: Share = 1.0  # discount of each token

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")

    def advantages(self, samples: Samples) -> Advantages:
        places = timeline(samples.mask_RT, samples.episode_R, samples.episodes)
        returns_NL = backward_sum(to_timeline(token_rewards(samples), *places), self.gamma)
        returns_RT = from_timeline(returns_NL, *places, samples.mask_RT)
        return Advantages(whiten(returns_RT, samples.mask_RT), returns_RT)


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlusBaseline:
    needs: ClassVar[Needs] = Needs(min_group_size=2)

    def advantages(self, samples: Samples) -> Advantages:
        return Advantages(whiten(centred(samples.total_reward(), samples.group_N), samples.lengths()))
