"""GiGPO: Group-in-Group Policy Optimization. Episodes are compared with episodes, turns with turns in the same state.

Feng et al. 2025, https://arxiv.org/abs/2505.10978

    A^E_i   = (R_i − mean_j R_j) / (σ_j(R_j) + ε)                   over the episodes j of the group
    G_i,t   = r_i,t + γ G_i,t+1                                     over the turns t of episode i
    A^S_i,t = (G_i,t − mean G) / (σ(G) + ε)                         over the group's turns in the same state as turn t
    A_i,t   = A^E_i + ω A^S_i,t

The states are those that the environment names (`covey.Observation(..., state=...)`); a turn without one is compared
with turns of the same prompt, that is, of the same history. A state visited once has A^S = 0; without repeated states
beyond the first turn, GiGPO is GRPO there. A state that an episode visits twice counts twice, as in the paper.

Deviations: R̄ and σ_R count every episode once, as in the paper; the authors' code by default counts it once per turn.
A group of one, or of equal rewards, has advantage 0; the authors' code leaves the reward of a group of one as it is.
Shapes: N episodes, K turns, R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from covey.algorithms.ops import centred, group_size, normalised, returns_to_go, to_tokens, turn_rewards, turns_of
from covey.protocols import Advantages, Needs
from covey.ranges import Coefficient, Epsilon, Share, check_ranges
from covey.types import Samples

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gigpo:
    needs: ClassVar[Needs] = Needs(min_group_size=2, turns=True)

    gamma: Share = 0.95  # discount of each turn
    step_weight: Coefficient = 1.0  # ω: weight of the advantage within the state
    std_normalize: bool = True  # divide by standard deviations
    epsilon: Epsilon = 1e-6  # added to standard deviations

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")

    def advantages(self, samples: Samples) -> Advantages:
        turns = turns_of(samples)
        return_K = returns_to_go(turn_rewards(samples, turns), turns, self.gamma)
        episode_N = self._relative(samples.total_reward(), samples.group_N)
        advantage_K = episode_N[turns.episode_K] + self.step_weight * self._relative(return_K, turns.state_K)
        size_K = group_size(turns.state_K)
        metrics = {
            "gigpo/state_visits": float(size_K.mean()),
            "gigpo/shared_states": float((size_K > 1).double().mean()),
        }
        if samples.turns is None:
            return Advantages(advantage_K, metrics=metrics)
        return Advantages(to_tokens(advantage_K, turns, samples.mask_RT), metrics=metrics)

    def _relative(self, x: Tensor, group: Tensor) -> Tensor:
        return normalised(x, group, self.epsilon) if self.std_normalize else centred(x, group)
