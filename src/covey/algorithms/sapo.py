"""SAPO: Soft Adaptive Policy Optimization, a smooth gate instead of a clip.

Gao et al. 2025, https://arxiv.org/abs/2511.20347

    f(r) = 4/τ · sigmoid( τ (r − 1) )          τ = τ_pos where A_t > 0, else τ_neg
    L_t  = −f(r_t) A_t                         r_t = π_θ(y_t) / π_old(y_t)

f has slope 1 at r = 1, so on-policy it is the plain policy gradient; far from 1 the gradient decays instead of
being cut. τ_neg > τ_pos makes it decay sooner for bad answers, whose gradient spreads over all other tokens.

Deviations: log-ratios are clamped to ±20. Shapes: R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from covey.algorithms.ops import masked_mean, probability_ratio
from covey.imports import torch
from covey.protocols import Couples, Metrics, TokenOutputs
from covey.ranges import Positive, check_ranges
from covey.types import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sapo:
    term: ClassVar[str] = "policy"
    couples: ClassVar[Couples] = "nothing"
    on_policy_only: ClassVar[bool] = False

    tau_pos: Positive = 1.0  # how fast the gate closes for good answers
    tau_neg: Positive = 1.05  # how fast it closes for bad ones

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")

    def loss(self, out: TokenOutputs, batch: Batch) -> Tensor:
        return -self._sigmoid(out, batch) * 4 / self._tau(batch) * batch.advantages_RT

    def _tau(self, batch: Batch) -> Tensor:
        positive, negative = batch.advantages_RT.new_tensor([self.tau_pos, self.tau_neg])
        return torch.where(batch.advantages_RT > 0, positive, negative)

    def _sigmoid(self, out: TokenOutputs, batch: Batch) -> Tensor:
        ratio = probability_ratio(out.logprobs, batch.old_logprobs_RT)
        return torch.sigmoid(self._tau(batch) * (ratio - 1))

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        """The mean opening of the gate: 1 on-policy, 0 for a token without gradient."""
        gate = self._sigmoid(out, batch)
        return {"policy/gate": masked_mean(4 * gate * (1 - gate), batch.mask_RT)}
