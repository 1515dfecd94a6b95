"""The clipped policy loss of PPO, which GRPO, DAPO and Dr. GRPO share.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347; dual clip: Ye et al. 2020, https://arxiv.org/abs/1912.09729

    r_t = π_θ(y_t) / π_old(y_t)
    L_t = −min( r_t A_t,  clip(r_t, 1 − ε_low, 1 + ε_high) A_t )         and for A_t < 0:  L_t ≤ −c A_t

Losses of other names are the same with another aggregation or bound:
    dapo     ε_high = 0.28, mean over all tokens of the step       Yu et al. 2025, https://arxiv.org/abs/2503.14476
    dr_grpo  sum over an answer / a constant                       Liu et al. 2025, https://arxiv.org/abs/2503.20783

Deviations: log-ratios are clamped to ±20 before exp; a token beyond has no gradient.
Shapes: R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from covey.algorithms.ops import masked_mean, probability_ratio
from covey.imports import torch
from covey.protocols import Couples, Metrics, TokenOutputs
from covey.ranges import Cap, Range, check_ranges
from covey.types import Batch

if TYPE_CHECKING:
    from torch import Tensor

AboveOne = Annotated[float, Range(1, 1e30, above=True)]


@dataclass(frozen=True, slots=True)
class PpoClip:
    term: ClassVar[str] = "policy"
    couples: ClassVar[Couples] = "nothing"
    on_policy_only: ClassVar[bool] = False

    clip_low: Cap = 0.2  # the ratio counts down to 1 − clip_low
    clip_high: Cap = 0.2  # the ratio counts up to 1 + clip_high
    dual_clip: AboveOne | None = 3.0  # bound on the loss of bad answers whose ratio explodes; null: none

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")

    def loss(self, out: TokenOutputs, batch: Batch) -> Tensor:
        ratio, advantage = probability_ratio(out.logprobs, batch.old_logprobs_RT), batch.advantages_RT
        loss = -torch.min(ratio * advantage, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantage)
        if self.dual_clip is not None:
            loss = torch.where(advantage < 0, torch.min(loss, -self.dual_clip * advantage), loss)
        return loss

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        ratio = probability_ratio(out.logprobs, batch.old_logprobs_RT)
        return clip_fractions(ratio, batch, self.clip_low, self.clip_high)


def clip_fractions(ratio: Tensor, batch: Batch, low: float, high: float) -> Metrics:
    """The share of tokens whose loss has no gradient because their ratio is clipped."""
    below = (ratio < 1 - low) & (batch.advantages_RT < 0)
    above = (ratio > 1 + high) & (batch.advantages_RT > 0)
    return {
        "policy/clip_low": masked_mean(below.double(), batch.mask_RT),
        "policy/clip_high": masked_mean(above.double(), batch.mask_RT),
    }
