"""Turn returns: GRPO for each turn, with the discounted sum of the rewards from that turn on.

Policy gradient with rewards to go, Sutton et al. 1999, and GRPO's baseline, Shao et al. 2024,
https://arxiv.org/abs/2402.03300; for turns of agents, Zeng et al. 2025, https://arxiv.org/abs/2505.11821

    G_i,t = r_i,t + γ G_i,t+1                                       over the turns t of episode i
    A_i,t = (G_i,t − mean_j G_j,t) / (σ_j(G_j,t) + ε)               over the episodes j of the group that have a turn t

r_i,t is the reward that turn t received; rewards that are not for a turn, such as an answer's score, are on the last
turn. All tokens of a turn have its advantage. A turn that only one episode reaches has no baseline and advantage 0.

If only last turns receive a reward and γ = 1, A_i,t is GRPO's advantage at every t that all episodes of the group
reach, the first turn always; if the episodes have equally many turns, everywhere.

Deviations: from the last paper, which adds the advantage of the turn's own reward to that of the outcome: here a turn
is credited with all later rewards. Shapes: N episodes, K turns, R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from covey.algorithms.ops import centred, labels, normalised, returns_to_go, to_tokens, turn_rewards, turns_of
from covey.protocols import Advantages, Needs
from covey.ranges import Epsilon, Share, check_ranges
from covey.types import Samples


@dataclass(frozen=True, slots=True)
class TurnReturns:
    needs: ClassVar[Needs] = Needs(min_group_size=2, turns=True)

    gamma: Share = 1.0  # discount of each turn
    std_normalize: bool = True  # divide by the standard deviation of the group's returns at that turn
    epsilon: Epsilon = 1e-6  # added to the standard deviation

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")

    def advantages(self, samples: Samples) -> Advantages:
        turns = turns_of(samples)
        return_K = returns_to_go(turn_rewards(samples, turns), turns, self.gamma)
        same_turn_K = labels(samples.group_N[turns.episode_K], turns.number_K)
        if self.std_normalize:
            advantage_K = normalised(return_K, same_turn_K, self.epsilon)
        else:
            advantage_K = centred(return_K, same_turn_K)
        if samples.turns is None:
            return Advantages(advantage_K)
        return Advantages(to_tokens(advantage_K, turns, samples.mask_RT))
