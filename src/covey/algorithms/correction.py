"""Importance correction of samples that come from another distribution than the learner's policy.

An engine with other kernels, top-p or top-k sampling, or an older policy sample from q; the learner's policy at the
start of the step is π_old. Each token's advantage is multiplied by

    w = min( π_old/q, cap )                    of the token, or of the whole answer (sequence)
    w = 0  where ρ lies outside [reject_below, reject_above]

    ρ = π_old/q                                 of the token or the whole answer: as the weight, or by `reject_level`
    ρ = exp( 1/|y| Σ_t log π_old/q )            geometric: the mean per token, which does not grow with the length

π_old is computed by the learner before the first update, and the ratio of the loss is π/π_old. With `recompute`, w = 1.

Espeholt et al. 2018, https://arxiv.org/abs/1802.01561 (truncation); Yao et al. 2025, "Your efficient RL framework
secretly brings you off-policy RL training"; Liu et al. 2025, "When speed kills stability", https://richardli.xyz/rl-collapse
(geometric rejection)

Deviations: rejected tokens still count in the loss's mean (with weight 0), so rejection never raises the weight of the
others. Log-ratios are clamped to ±20. Shapes: N episodes, R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from covey.algorithms.ops import effective_sample_size, episode_sum, masked_mean
from covey.imports import torch
from covey.protocols import Metrics, Needs
from covey.ranges import Cap, PositiveCap, check_ranges

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Correction:
    correction: str = "auto"  # none | recompute | token | sequence; auto: token if sampling is cut, by vllm or async
    correction_cap: PositiveCap = 2.0  # largest importance weight
    reject_below: Cap | None = None  # samples with a smaller ratio than this are rejected
    reject_above: Cap | None = None  # samples with a larger ratio than this are rejected
    reject_level: str = "auto"  # whose ratio: token | sequence | geometric (an answer's mean); auto: as correction

    def __post_init__(self) -> None:
        known = ("auto", "none", "recompute", "token", "sequence")
        if self.correction not in known:
            raise ValueError(f"algorithm.correction must be one of {', '.join(known)}, got {self.correction!r}")
        check_ranges(self, "algorithm.")
        if (self.reject_below or 0.0) > (torch.inf if self.reject_above is None else self.reject_above):
            raise ValueError("algorithm.reject_below is above reject_above: every sample would be rejected")
        levels = ("auto", "token", "sequence", "geometric")
        if self.reject_level not in levels:
            raise ValueError(f"algorithm.reject_level must be one of {', '.join(levels)}, got {self.reject_level!r}")
        if self.reject_level != "auto" and not self._rejects:
            raise ValueError("algorithm.reject_level needs reject_below or reject_above")
        without = ("none", "recompute") if self.reject_level == "auto" else ("none",)
        if self._rejects and self.correction in without:
            raise ValueError(
                "algorithm.reject_below and reject_above need correction=token or sequence, or recompute with "
                "reject_level"
            )

    @property
    def _rejects(self) -> bool:
        return (self.reject_below, self.reject_above) != (None, None)

    @property
    def active(self) -> bool:
        return self.correction in ("token", "sequence") or (self.correction == "recompute" and self._rejects)

    @property
    def needs(self) -> Needs:
        return Needs(proximal=self.active or self.correction == "recompute")

    def weights(
        self, old_RT: Tensor, sampling_RT: Tensor, mask_RT: Tensor, episode_R: Tensor, episodes: int
    ) -> tuple[Tensor, Metrics]:
        """w of each token, [R, T], and metrics of the difference between the two policies."""
        log_ratio_RT = torch.where(mask_RT, old_RT - sampling_RT, torch.zeros_like(old_RT)).detach()
        sum_N = episode_sum(log_ratio_RT, mask_RT, episode_R, episodes)

        def ratio(level: str) -> Tensor:
            if level == "token":
                return torch.exp(log_ratio_RT.clamp(-20, 20))
            length_N = episode_sum(mask_RT.to(sum_N.dtype), mask_RT, episode_R, episodes).clamp(min=1)
            log_N = sum_N / length_N if level == "geometric" else sum_N
            return torch.exp(log_N.clamp(-20, 20))[episode_R][:, None].expand(log_ratio_RT.shape)

        ratio_RT = torch.ones_like(log_ratio_RT) if self.correction == "recompute" else ratio(self.correction)
        judged_RT = ratio_RT if self.reject_level == "auto" else ratio(self.reject_level)
        low = 0.0 if self.reject_below is None else self.reject_below
        high = torch.inf if self.reject_above is None else self.reject_above
        out_RT = (judged_RT < low) | (judged_RT > high)
        weight_RT = ratio_RT.clamp(max=self.correction_cap).masked_fill(out_RT, 0.0)
        metrics = {
            "correction/mismatch": masked_mean(log_ratio_RT.abs(), mask_RT),
            "correction/weight_mean": masked_mean(weight_RT, mask_RT),
            "correction/capped": masked_mean((ratio_RT > self.correction_cap).double(), mask_RT),
            "correction/rejected": masked_mean(out_RT.double(), mask_RT),
            "correction/ess": effective_sample_size(weight_RT[mask_RT]),
        }
        return weight_RT, metrics
