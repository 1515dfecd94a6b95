"""GMPO: Geometric-Mean Policy Optimization, the geometric mean of an answer's clipped token ratios.

Zhao et al. 2025, https://arxiv.org/abs/2507.20673

    d_t = log π_θ(y_t)/π_old(y_t)
    c_t = min(d_t, ε_high) where A > 0,  max(d_t, −ε_low) where A < 0
    L_i = −exp( 1/|y_i| Σ_t c_t ) A_i

GRPO's arithmetic mean of the ratios follows outliers, the geometric mean does not, which allows bounds as wide as
e^±0.4. GSPO has the same mean and clips it as a whole; here each token is clipped. In token form, with ρ_i the mean,

    L_t = −ρ_i,t A_t        value of ρ_i; gradient of the token's own log π, none if the token is clipped

Deviations: with advantages that differ within an answer each token has its own (verl takes their mean). The log of ρ_i
is clamped to ±20. Shapes: N episodes, R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from covey.algorithms.gspo import sequence_ratio
from covey.algorithms.ops import masked_mean, policy_sum
from covey.imports import torch
from covey.protocols import Couples, Metrics, TokenOutputs
from covey.ranges import Cap, check_ranges
from covey.types import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gmpo:
    term: ClassVar[str] = "policy"
    couples: ClassVar[Couples] = "episodes"
    on_policy_only: ClassVar[bool] = False

    clip_low: Cap = 0.4  # the log-ratio of a bad token counts down to −clip_low
    clip_high: Cap = 0.4  # the log-ratio of a good token counts up to clip_high

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")

    def first_pass(self, out: TokenOutputs, batch: Batch) -> Batch:
        return replace(batch, policy_sum_N=policy_sum(self._clipped(out, batch), batch))

    def loss(self, out: TokenOutputs, batch: Batch) -> Tensor:
        return -sequence_ratio(self._clipped(out, batch), batch) * batch.advantages_RT

    def _clipped(self, out: TokenOutputs, batch: Batch) -> TokenOutputs:
        """The outputs with log π_old + c_t as log-probs."""
        log_ratio = out.logprobs - batch.old_logprobs_RT
        bounded = torch.where(
            batch.advantages_RT > 0, log_ratio.clamp(max=self.clip_high), log_ratio.clamp(min=-self.clip_low)
        )
        return replace(out, logprobs=(batch.old_logprobs_RT + bounded).where(batch.mask_RT, 0))

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        log_ratio = out.logprobs - batch.old_logprobs_RT
        below = (log_ratio < -self.clip_low) & (batch.advantages_RT < 0)
        above = (log_ratio > self.clip_high) & (batch.advantages_RT > 0)
        return {
            "policy/clip_low": masked_mean(below.double(), batch.mask_RT),
            "policy/clip_high": masked_mean(above.double(), batch.mask_RT),
        }
