"""GSPO: Group Sequence Policy Optimization, one ratio per answer.

Zheng et al. 2025, https://arxiv.org/abs/2507.18071

    s_i   = exp( 1/|y_i| Σ_t log π_θ(y_i,t)/π_old(y_i,t) )                   the geometric mean of the token ratios
    s_i,t = sg(s_i) · π_θ(y_i,t) / sg(π_θ(y_i,t))                            value of s_i, gradient of the token
    L_t   = −min( s_i,t A_t,  clip(s_i,t, 1 − ε_low, 1 + ε_high) A_t )

so an answer is clipped as a whole; the bounds are a thousand times tighter than for token ratios. With advantages
that differ within an answer it is the paper's GSPO-token.

π_old is computed by the learner before the first update: the sampler's log-probs are not exact enough.

LUSPO (Liu et al. 2026, https://arxiv.org/abs/2602.05261) is the same loss times |y_i|, the sum over an answer's tokens,
so that a long answer has the same weight per token as a short one: loss=luspo.

Deviations: log s is clamped to ±20; an answer beyond has no gradient. Shapes: N episodes, R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from covey.algorithms.ops import policy_sum
from covey.algorithms.ppo_clip import clip_fractions
from covey.imports import torch
from covey.protocols import Couples, Metrics, Needs, TokenOutputs
from covey.ranges import Cap, check_ranges
from covey.types import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gspo:
    term: ClassVar[str] = "policy"
    couples: ClassVar[Couples] = "episodes"
    on_policy_only: ClassVar[bool] = False
    # The bounds are tighter than the rounding differences between a half-precision sampler and the learner.
    needs: ClassVar[Needs] = Needs(proximal=True)

    clip_low: Cap = 3e-4  # the ratio of an answer counts down to 1 − clip_low
    clip_high: Cap = 4e-4  # the ratio of an answer counts up to 1 + clip_high

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")

    def loss(self, out: TokenOutputs, batch: Batch) -> Tensor:
        ratio, advantage = sequence_ratio(out, batch), batch.advantages_RT
        return -torch.min(ratio * advantage, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantage)

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        return clip_fractions(sequence_ratio(out, batch), batch, self.clip_low, self.clip_high)


def sequence_ratio(out: TokenOutputs, batch: Batch) -> Tensor:
    """s_i,t, [R, T]"""
    length_N = batch.length_N.clamp(min=1).to(out.logprobs.dtype)
    log_ratio_N = (policy_sum(out, batch) - batch.old_sum_N) / length_N
    own_gradient = out.logprobs - out.logprobs.detach()  # 0, with the gradient of log π
    return torch.exp((log_ratio_N[batch.episode_R][:, None] + own_gradient).clamp(-20, 20))
