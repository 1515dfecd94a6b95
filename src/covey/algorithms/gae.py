"""PPO's advantage: generalised advantage estimation with a critic, and the critic's clipped loss.

Schulman et al. 2015, https://arxiv.org/abs/1506.02438; 2017, https://arxiv.org/abs/1707.06347

    δ_t = r_t + γ_t V_{t+1} − V_t              γ_t = γ within a turn, γ · turn_gamma from a turn to the next
    A_t = δ_t + γ_t λ A_{t+1}                  over an episode's sampled tokens in time order
    returns = A + V                            before A is whitened over all tokens of the step

    value loss  ½ max( (V_θ − returns)²,  (clip(V_θ, V ± c) − returns)² )

An episode's reward is on its last sampled token, a reward that a turn received on the turn's last one; tokens of tools
and templates in between are skipped, and time runs across turns and forked rows. V_t is the critic's value before
token t. Group size 1 is fine.

Deviations: none. Shapes: N episodes, L tokens of the longest, R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from covey.algorithms.ops import backward_sum, from_timeline, masked_mean, timeline, to_timeline, token_rewards, whiten
from covey.imports import torch
from covey.protocols import Advantages, Needs
from covey.ranges import Share, check_ranges
from covey.types import Samples

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gae:
    needs: ClassVar[Needs] = Needs(values=True, turns=True)

    gamma: Share = 1.0  # discount of each token
    turn_gamma: Share = 1.0  # further discount from a turn to the next
    lam: Share = 1.0  # λ: 1 relies on the rewards (no bias), 0 on the critic (no variance)

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")

    def advantages(self, samples: Samples) -> Advantages:
        assert samples.values_RT is not None, "generalised advantage estimation needs a critic's values"
        places = timeline(samples.mask_RT, samples.episode_R, samples.episodes)
        reward_NL = to_timeline(token_rewards(samples), *places)
        value_NL = to_timeline(samples.values_RT.to(reward_NL.dtype), *places)
        next_NL = torch.cat([value_NL[:, 1:], torch.zeros_like(value_NL[:, :1])], dim=1)
        discount = self._discounts(samples, places)
        advantage_NL = backward_sum(reward_NL + discount * next_NL - value_NL, discount * self.lam)
        advantage_RT = from_timeline(advantage_NL, *places, samples.mask_RT)
        returns_RT = from_timeline(advantage_NL + value_NL, *places, samples.mask_RT)
        metrics = {
            "value/mean": masked_mean(samples.values_RT, samples.mask_RT),
            "value/returns_mean": masked_mean(returns_RT, samples.mask_RT),
            "value/explained_variance": explained_variance(samples.values_RT, returns_RT, samples.mask_RT),
        }
        return Advantages(whiten(advantage_RT, samples.mask_RT), returns_RT, metrics)

    def _discounts(self, samples: Samples, places: tuple[Tensor, Tensor]) -> float | Tensor:
        """γ_t: one number, or one for each token, [N, L]."""
        if self.turn_gamma == 1 or samples.turns is None:
            return self.gamma
        turn_NL = to_timeline(samples.turns.turn_RT, *places)
        passed_NL = (turn_NL.roll(-1, dims=1) - turn_NL).clamp(min=0)  # turns from a token to the next
        return self.gamma * self.turn_gamma ** passed_NL.to(samples.outcome_reward().dtype)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """The loss per token. Moving more than `clip` from the old value has no gradient; None: no clipping."""
    error = (values - returns) ** 2
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.max(error, (clipped - returns) ** 2)
    return error / 2


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 − Var(returns − V) / Var(returns): 1 a perfect critic, 0 a constant, below 0 worse than a constant."""
    v, g = values[mask].double(), returns[mask].double()
    variance = float(g.var(unbiased=False)) if len(g) else 0.0
    return 1 - float((g - v).var(unbiased=False)) / variance if variance > 0 else 0.0
