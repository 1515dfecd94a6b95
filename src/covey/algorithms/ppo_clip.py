"""The clipped policy loss of PPO, with an optional KL to the reference policy.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347; dual clip: Ye et al. 2020, https://arxiv.org/abs/1912.09729;
KL in the loss, as GRPO has it: Shao et al. 2024, https://arxiv.org/abs/2402.03300

    r_t = π_θ(y_t) / π_old(y_t)
    L_t = −min( r_t A_t,  clip(r_t, 1 − ε_low, 1 + ε_high) A_t )         and for A_t < 0:  L_t ≤ −c A_t
    L   = aggregate(L_t) + kl_coef · aggregate(KL_t)

Deviations: log-ratios are held to ±20 before exp, beyond which every value is clipped anyway; GRPO's paper sets
kl_coef = 0.04, here it is 0: then no reference policy is needed.
Shapes: R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from covey.algorithms.ops import AGGREGATIONS, KL_NAMES, aggregate, kl_penalty, masked_mean, probability_ratio
from covey.protocols import LossTerm, Metrics, Needs, TokenOutputs
from covey.types import Batch


@dataclass(frozen=True, slots=True)
class PpoClip:
    clip_low: float = 0.2  # the ratio counts down to 1 − clip_low
    clip_high: float = 0.2  # the ratio counts up to 1 + clip_high
    dual_clip: float | None = 3.0  # bound on the loss of bad answers whose ratio explodes; null: none
    aggregation: str = "seq-mean-token-mean"  # or token-mean, seq-mean-token-sum, seq-mean-token-sum-norm
    norm_length: int | None = None  # the constant of seq-mean-token-sum-norm, usually rollout.max_tokens
    kl_coef: float = 0.0  # weight of the KL to the start model in the loss
    kl_estimator: str = "k3"  # k1 (kl) | abs | k2 (mse) | k3 (low_var_kl)

    def __post_init__(self) -> None:
        if self.clip_low < 0 or self.clip_high < 0:
            raise ValueError("algorithm.clip_low and clip_high must not be negative")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"algorithm.dual_clip must be greater than 1, got {self.dual_clip}")
        if self.kl_estimator not in KL_NAMES:
            raise ValueError(f"algorithm.kl_estimator must be one of {', '.join(KL_NAMES)}, got {self.kl_estimator!r}")
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"algorithm.aggregation must be one of {', '.join(AGGREGATIONS)}")
        if self.aggregation == "seq-mean-token-sum-norm" and not self.norm_length:
            raise ValueError("seq-mean-token-sum-norm divides by a constant: set algorithm.norm_length to it")

    @property
    def needs(self) -> Needs:
        return Needs(reference=self.kl_coef != 0)

    @property
    def couples_groups(self) -> bool:
        return False

    def loss(self, out: TokenOutputs, batch: Batch) -> dict[str, LossTerm]:
        ratio, advantage = probability_ratio(out.logprobs, batch.old_logprobs_RT), batch.advantages_RT
        loss = -torch.min(ratio * advantage, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantage)
        if self.dual_clip is not None:
            loss = torch.where(advantage < 0, torch.min(loss, -self.dual_clip * advantage), loss)
        terms = {"policy": aggregate(loss, batch, self.aggregation, self.norm_length)}
        if self.kl_coef:
            assert batch.ref_logprobs_RT is not None, "a KL in the loss needs reference log-probs"
            kl = kl_penalty(out.logprobs, batch.ref_logprobs_RT, self.kl_estimator)
            terms["kl"] = aggregate(self.kl_coef * kl, batch, self.aggregation, self.norm_length)
        return terms

    @torch.no_grad()
    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        ratio, advantage = probability_ratio(out.logprobs, batch.old_logprobs_RT), batch.advantages_RT
        mask = batch.mask_RT
        found = {
            "policy/clip_low": masked_mean(((ratio < 1 - self.clip_low) & (advantage < 0)).double(), mask),
            "policy/clip_high": masked_mean(((ratio > 1 + self.clip_high) & (advantage > 0)).double(), mask),
        }
        if batch.ref_logprobs_RT is not None:
            kl = kl_penalty(out.logprobs, batch.ref_logprobs_RT, self.kl_estimator)
            found["kl/reference"] = masked_mean(kl, mask)
        return found
