"""Clip-Cov and KL-Cov: the few tokens that make the entropy collapse are held back.

Cui et al. 2025, https://arxiv.org/abs/2505.22617

    cov_t = ( log π_θ(y_t) − mean )( A_t − mean )           means over all sampled tokens of the mini-batch

A step of policy gradient lowers the entropy by the covariance of log π and A, and a small share of the tokens makes up
most of it: likely tokens with a high advantage. With r_t = π_θ(y_t)/π_old(y_t),

    Clip-Cov    L_t = −min( r_t A_t, clip(r_t, 1 − ε_low, 1 + ε_high) A_t )
                and 0 for a random share r of all tokens, out of those with ω_low < cov_t < ω_high that are not clipped
    KL-Cov      L_t = −r_t A_t,  + β |log r_t| for the share k of all tokens with the largest cov_t

Deviations: means, shares and ranks are those of the mini-batch, whatever its micro-batches (the authors' are those of a
micro-batch). Clip-Cov's random choice is a hash of the token's own numbers, the same if a run is resumed. The KL is the
authors' |log r|. Log-ratios in r are clamped to ±20. Shapes: R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from covey.algorithms.ops import masked_mean, probability_ratio
from covey.errors import InputError
from covey.imports import torch
from covey.protocols import Couples, Metrics, TokenOutputs
from covey.ranges import Cap, Coefficient, Share, check_ranges
from covey.types import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ClipCov:
    term: ClassVar[str] = "policy"
    couples: ClassVar[Couples] = "batch"
    on_policy_only: ClassVar[bool] = False

    clip_cov_ratio: Share = 2e-4  # share of all tokens that is skipped
    clip_cov_low: Cap = 1.0  # only tokens with a covariance above this
    clip_cov_high: Cap = 5.0  # only tokens with a covariance below this
    clip_low: Cap = 1.0  # the ratio counts down to 1 − clip_low
    clip_high: Cap = 1.0  # the ratio counts up to 1 + clip_high

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")
        if self.clip_cov_low > self.clip_cov_high:
            raise InputError(
                f"algorithm.clip_cov_low={self.clip_cov_low:g} is over clip_cov_high={self.clip_cov_high:g}"
            )

    def first_pass(self, out: TokenOutputs, batch: Batch) -> Batch:
        return replace(batch, chosen_RT=self._chosen(out, batch))

    def loss(self, out: TokenOutputs, batch: Batch) -> Tensor:
        return torch.where(self._chosen(out, batch), 0.0, torch.maximum(*self._both(out, batch)))

    def _both(self, out: TokenOutputs, batch: Batch) -> tuple[Tensor, Tensor]:
        ratio, advantage = probability_ratio(out.logprobs, batch.old_logprobs_RT), batch.advantages_RT
        return -ratio * advantage, -ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantage

    def _chosen(self, out: TokenOutputs, batch: Batch) -> Tensor:
        if batch.chosen_RT is not None:
            return batch.chosen_RT
        plain, clipped = self._both(out, batch)
        cov = covariance(out, batch)
        among = batch.mask_RT & (cov > self.clip_cov_low) & (cov < self.clip_cov_high) & ~(clipped > plain)
        place = torch.arange(batch.mask_RT.shape[1], device=cov.device)
        hashed = 12.9898 * batch.old_logprobs_RT.double() + 78.233 * batch.advantages_RT.double() + place + batch.epoch
        return largest(torch.frac(hashed.sin().abs() * 43758.5453), among, self.clip_cov_ratio, batch)

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        return _metrics(self._chosen(out, batch), out, batch)


@dataclass(frozen=True, slots=True)
class KlCov:
    term: ClassVar[str] = "policy"
    couples: ClassVar[Couples] = "batch"
    on_policy_only: ClassVar[bool] = False

    kl_cov_ratio: Share = 2e-4  # share of all tokens that is held back
    kl_cov_coef: Coefficient = 1.0  # weight of their KL to the sampling policy

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")

    def first_pass(self, out: TokenOutputs, batch: Batch) -> Batch:
        return replace(batch, chosen_RT=self._chosen(out, batch))

    def loss(self, out: TokenOutputs, batch: Batch) -> Tensor:
        policy = -probability_ratio(out.logprobs, batch.old_logprobs_RT) * batch.advantages_RT
        kl = (out.logprobs - batch.old_logprobs_RT).abs()
        return torch.where(self._chosen(out, batch), policy + self.kl_cov_coef * kl, policy)

    def _chosen(self, out: TokenOutputs, batch: Batch) -> Tensor:
        if batch.chosen_RT is not None:
            return batch.chosen_RT
        return largest(covariance(out, batch), batch.mask_RT, self.kl_cov_ratio, batch)

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        return _metrics(self._chosen(out, batch), out, batch)


def covariance(out: TokenOutputs, batch: Batch) -> Tensor:
    """cov_t of every sampled token, [R, T], without gradient."""
    mask, tokens = batch.mask_RT, batch.mask_RT.sum().clamp(min=1)
    columns = (torch.where(mask, x.detach(), 0.0) for x in (out.logprobs, batch.advantages_RT))
    logprob, advantage = (x - x.sum() / tokens for x in columns)
    return logprob * advantage


def largest(x_RT: Tensor, among_RT: Tensor, share: float, batch: Batch) -> Tensor:
    """Those of `among_RT` with the largest x, as a mask [R, T]: this share of all tokens, at least one."""
    number = max(int(share * int(batch.mask_RT.sum())), 1)
    ranked = x_RT.masked_fill(~among_RT, -torch.inf).flatten()
    top = ranked.topk(min(number, int(among_RT.sum()))).indices
    return torch.zeros_like(among_RT).flatten().index_fill(0, top, True).view_as(among_RT)


def _metrics(chosen: Tensor, out: TokenOutputs, batch: Batch) -> Metrics:
    values = {"cov/held_back": chosen.double(), "cov/mean": covariance(out, batch)}
    return {name: masked_mean(value, batch.mask_RT) for name, value in values.items()}
