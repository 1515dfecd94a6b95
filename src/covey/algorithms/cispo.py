"""CISPO: Clipped IS-weight Policy Optimization. Importance weights are clipped, gradients are not.

MiniMax 2025, https://arxiv.org/abs/2506.13585

    L_t = −sg( clip(r_t, 1 − ε_low, 1 + ε_high) ) A_t log π_θ(y_t)           r_t = π_θ(y_t) / π_old(y_t)

Every token keeps its gradient, also the rare ones that start a new line of reasoning, which PPO's clipping drops.

Deviations: the paper gives no ε_high; 4 bounds the weight at 5, within what Khatri et al. 2025
(https://arxiv.org/abs/2510.13786) found good. As in the paper there is no lower bound (ε_low = 1). Log-ratios are
clamped to ±20. Shapes: R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from covey.algorithms.ops import masked_mean, probability_ratio
from covey.protocols import Couples, Metrics, TokenOutputs
from covey.ranges import Cap, check_ranges
from covey.types import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cispo:
    term: ClassVar[str] = "policy"
    couples: ClassVar[Couples] = "nothing"
    on_policy_only: ClassVar[bool] = False

    clip_low: Cap = 1.0  # the weight of a token is at least 1 − clip_low
    clip_high: Cap = 4.0  # the weight of a token is at most 1 + clip_high

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")

    def loss(self, out: TokenOutputs, batch: Batch) -> Tensor:
        ratio = probability_ratio(out.logprobs.detach(), batch.old_logprobs_RT)
        return -ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * batch.advantages_RT * out.logprobs

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        ratio = probability_ratio(out.logprobs, batch.old_logprobs_RT)
        return {
            "policy/clip_low": masked_mean((ratio < 1 - self.clip_low).double(), batch.mask_RT),
            "policy/clip_high": masked_mean((ratio > 1 + self.clip_high).double(), batch.mask_RT),
        }
