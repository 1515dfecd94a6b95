"""DPPO: Divergence Proximal Policy Optimization, a trust region of divergence instead of ratio clipping.

Qi et al. 2026, https://arxiv.org/abs/2602.04879

    p = π_θ(y_t),  q = π_old(y_t),  r_t = p/q
    tv   D = |p − q|                kl   D = q log q/p + (1 − q) log (1 − q)/(1 − p)
    L_t  = −m_t r_t A_t             m_t = 0 where D > δ and the update would move p further away from q, else 1

D is the divergence of the two policies on this token against all others, a lower bound of that over the vocabulary. A
ratio says little about it: 1e-5 → 1e-3 is a ratio of 100 and changes nothing, 0.99 → 0.8 is within PPO's bounds and
changes the policy. δ is `clip_high` for A > 0 and `clip_low` for A ≤ 0. `dppo_tv` and `dppo_kl` differ in D and δ.

The paper's π_old is the sampling policy itself, without recomputation: With `correction=auto` nothing is recomputed.

Deviations: the top-k divergence of the paper is not supported. Beyond `ratio_cap` (10 in the authors' code, 20 in verl)
the ratio's value and gradient are those of the cap. Log-ratios are clamped to ±20. Shapes: R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from covey.algorithms.ops import masked_mean, probability_ratio
from covey.algorithms.ppo_clip import AboveOne
from covey.imports import torch
from covey.protocols import Couples, Metrics, TokenOutputs
from covey.ranges import Cap, check_ranges
from covey.types import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Dppo:
    term: ClassVar[str] = "policy"
    couples: ClassVar[Couples] = "nothing"
    on_policy_only: ClassVar[bool] = False
    weighs_sampler: ClassVar[bool] = True  # its ratio is to the sampling policy: there is nothing left to correct

    divergence: str = "tv"  # tv | kl: how far the two policies are apart on a token
    clip_low: Cap = 0.15  # largest divergence of a bad token that loses probability
    clip_high: Cap = 0.15  # largest divergence of a good token that gains probability
    ratio_cap: AboveOne | None = 20.0  # largest ratio of a token; null: none

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")
        if self.divergence not in ("tv", "kl"):
            raise ValueError(f"algorithm.divergence must be tv or kl, got {self.divergence!r}")

    def loss(self, out: TokenOutputs, batch: Batch) -> Tensor:
        ratio = probability_ratio(out.logprobs, batch.old_logprobs_RT)
        if self.ratio_cap is not None:
            ratio = ratio * (self.ratio_cap / ratio.detach()).clamp(max=1)
        low, high = self._outside(out, batch)
        return torch.where(low | high, 0.0, -ratio * batch.advantages_RT)

    def _outside(self, out: TokenOutputs, batch: Batch) -> tuple[Tensor, Tensor]:
        """Bad tokens that fell too far, and good tokens that rose too far, [R, T]."""
        new, old = out.logprobs.detach(), batch.old_logprobs_RT
        good, apart = batch.advantages_RT > 0, self._divergence(new, old)
        return ~good & (new < old) & (apart > self.clip_low), good & (new > old) & (apart > self.clip_high)

    def _divergence(self, new: Tensor, old: Tensor) -> Tensor:
        if self.divergence == "tv":
            return (new.exp() - old.exp()).abs()
        rest_new, rest_old = ((1 - x.exp()).clamp(min=1e-8) for x in (new, old))
        return old.exp() * (old - new) + rest_old * (rest_old / rest_new).log()

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        low, high = self._outside(out, batch)
        return {
            "policy/clip_low": masked_mean(low.double(), batch.mask_RT),
            "policy/clip_high": masked_mean(high.double(), batch.mask_RT),
        }
