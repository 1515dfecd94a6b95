"""OTB: the optimal token baseline, a baseline of its own for each position of an answer.

Li et al. 2026, https://arxiv.org/abs/2602.07078

    w_i,t = ‖ ∂ log π(y_i,t) / ∂ logits ‖²  =  1 − 2 π(y_i,t) + Σ_v π(v)²
    W_i,t = Σ_{s ≤ t} w_i,s                                    the answer's gradient energy up to t
    B_t   = Σ_i W_i,t G_i,t / Σ_i W_i,t                        over the answers of the group that reach t
    A_i,t = G_i,t − B_t                                        G_i,t: reward from t to the end of the answer

The variance of the gradient is least if the baseline weighs each answer by the squared norm of its gradient so far; the
norm with respect to the logits stands for that of the weights. Positions are counted over an episode's sampled tokens
in time order, across tool turns and forked rows. Where one answer continues after all others have ended, the baseline
is 0.

Deviations: a group of one, or of equal rewards, has advantage 0. With importance correction the authors also weigh W by
the squared importance weights. Shapes: N episodes, G groups, L tokens of the longest, R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from covey.algorithms.ops import (
    backward_sum,
    from_timeline,
    group_std,
    masked_mean,
    timeline,
    to_timeline,
    token_rewards,
)
from covey.imports import torch
from covey.protocols import Advantages, Needs
from covey.types import Samples

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Otb:
    needs: ClassVar[Needs] = Needs(min_group_size=2, score_norms=True)

    def advantages(self, samples: Samples) -> Advantages:
        assert samples.score_norms_RT is not None, "the optimal token baseline needs the norms of the score"
        places, valid_NL = timeline(samples.mask_RT, samples.episode_R, samples.episodes)
        return_NL = backward_sum(to_timeline(token_rewards(samples), places, valid_NL), 1.0)
        energy_NL = to_timeline(samples.score_norms_RT.to(return_NL.dtype), places, valid_NL).cumsum(-1) * valid_NL

        def over_group(x_NL: Tensor) -> Tensor:
            return x_NL.new_zeros(samples.groups, x_NL.shape[1]).index_add(0, samples.group_N, x_NL)[samples.group_N]

        weight_NL = over_group(energy_NL)
        baseline_NL = over_group(energy_NL * return_NL) / torch.where(weight_NL > 0, weight_NL, 1.0)
        alone_NL = over_group(valid_NL.to(return_NL.dtype)) == 1
        signal_N = group_std(samples.total_reward(), samples.group_N) > 0
        advantage_NL = (return_NL - baseline_NL.masked_fill(alone_NL, 0.0)) * (valid_NL & signal_N[:, None])
        metrics = {"otb/score_norm": masked_mean(samples.score_norms_RT, samples.mask_RT)}
        return Advantages(from_timeline(advantage_NL, places, valid_NL, samples.mask_RT), metrics=metrics)
