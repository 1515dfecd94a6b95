"""Mathematics shared by the algorithms: group statistics, sums over tokens, KL estimators, diagnostics.

Shapes: N episodes, G groups, R rows, T response tokens. `group` holds 0..G-1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from covey.protocols import LossTerm
from covey.types import Batch, Sample

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_NAMES = {"k1": "k1", "kl": "k1", "abs": "abs", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}


def group_sum(x_N: Tensor, group_N: Tensor) -> Tensor:
    """Sum over each group, given back to its members: [N] → [N]."""
    return x_N.new_zeros(_groups(group_N)).index_add(0, group_N, x_N)[group_N]


def group_size(group_N: Tensor, dtype: torch.dtype = torch.float64, valid_N: Tensor | None = None) -> Tensor:
    """Members of each episode's group, [N]; with `valid_N`, those that count."""
    ones_N = torch.ones_like(group_N, dtype=dtype) if valid_N is None else valid_N.to(dtype)
    return group_sum(ones_N, group_N)


def group_mean(x_N: Tensor, group_N: Tensor, valid_N: Tensor | None = None) -> Tensor:
    kept_N = x_N if valid_N is None else torch.where(valid_N, x_N, torch.zeros_like(x_N))
    return group_sum(kept_N, group_N) / group_size(group_N, x_N.dtype, valid_N).clamp(min=1)


def group_std(x_N: Tensor, group_N: Tensor) -> Tensor:
    """Unbiased standard deviation of each group; 0 for a group of one. A spread within rounding of the values
    counts as exactly zero: constant 0.1s have no signal."""
    size_N = group_size(group_N, x_N.dtype)
    variance_N = group_sum((x_N - group_mean(x_N, group_N)) ** 2, group_N) / (size_N - 1).clamp(min=1)
    std_N = variance_N.sqrt()
    largest_G = x_N.new_zeros(_groups(group_N)).scatter_reduce(0, group_N, x_N.abs(), "amax")
    return torch.where(std_N <= _rounding(x_N.dtype) * largest_G[group_N], torch.zeros_like(std_N), std_N)


def _groups(group_N: Tensor) -> int:
    return int(group_N.max()) + 1 if len(group_N) else 0


def _rounding(dtype: torch.dtype) -> float:
    return max(1e-8, 4 * torch.finfo(dtype).eps)


def episode_sum(x_RT: Tensor, mask_RT: Tensor, episode_R: Tensor, episodes: int) -> Tensor:
    """Masked sum over the tokens of all rows of an episode: [R, T] → [N]."""
    sums_R = torch.where(mask_RT, x_RT, torch.zeros_like(x_RT)).sum(-1)
    return sums_R.new_zeros(episodes).index_add(0, episode_R, sums_R)


def make_batch(
    *,
    rows: tuple[Sample, ...],
    group_N: Tensor,
    rewards_N: Tensor,
    episode_R: Tensor,
    mask_RT: Tensor,
    old_logprobs_RT: Tensor,
    ref_logprobs_RT: Tensor | None,
    advantages_RT: Tensor,
    row_R: Tensor | None = None,
    **rest: Any,
) -> Batch:
    """A whole mini-batch; what is summed over tokens is summed here."""

    def over_tokens(x_RT: Tensor) -> Tensor:
        return episode_sum(x_RT, mask_RT, episode_R, len(group_N)).detach()

    return Batch(
        rows=rows,
        group_N=group_N,
        rewards_N=rewards_N,
        length_N=over_tokens(mask_RT.double()).long(),
        old_sum_N=over_tokens(old_logprobs_RT),
        ref_sum_N=None if ref_logprobs_RT is None else over_tokens(ref_logprobs_RT),
        policy_sum_N=None,
        row_R=torch.arange(len(episode_R), device=episode_R.device) if row_R is None else row_R,
        episode_R=episode_R,
        mask_RT=mask_RT,
        old_logprobs_RT=old_logprobs_RT,
        ref_logprobs_RT=ref_logprobs_RT,
        advantages_RT=advantages_RT,
        **rest,
    )


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, name: str) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference) from samples of the policy (Schulman 2020, "Approximating KL").

    With d = log π_ref − log π:   k1 = −d     abs = |d|     k2 = d²/2     k3 = e^d − 1 − d
    """
    if name not in KL_NAMES:
        raise ValueError(f"unknown KL estimator {name!r}; known: {', '.join(KL_NAMES)}")
    d = ref_logprobs - logprobs
    match KL_NAMES[name]:
        case "k1":
            return -d
        case "abs":
            return d.abs()
        case "k2":
            return d**2 / 2
        case _:
            return torch.expm1(d) - d


def probability_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """π / π_old of each token. Log-ratios are held to ±20, beyond which exp would overflow sums."""
    return torch.exp((logprobs - old_logprobs).clamp(-20, 20))


def aggregate(x_RT: Tensor, batch: Batch, how: str, norm_length: int | None = None) -> LossTerm:
    """Sum a token-level loss so that the learner's one division gives the named mean.

    token-mean               Σ_all tokens / number of tokens
    seq-mean-token-sum       Σ_episode / number of episodes
    seq-mean-token-mean      mean over an episode's tokens, then over episodes
    seq-mean-token-sum-norm  Σ_episode / norm_length, then over episodes (Dr. GRPO's constant)
    """
    assert how in AGGREGATIONS, how
    x_RT = torch.where(batch.mask_RT, x_RT, torch.zeros_like(x_RT))
    if how == "token-mean":
        return LossTerm(x_RT.sum(), "tokens")
    if how == "seq-mean-token-mean":
        length_R = batch.length_N[batch.episode_R].clamp(min=1).to(x_RT.dtype)
        return LossTerm((x_RT.sum(-1) / length_R).sum(), "episodes")
    if how == "seq-mean-token-sum-norm":
        assert norm_length is not None, "seq-mean-token-sum-norm divides by a constant"
        return LossTerm(x_RT.sum() / norm_length, "episodes")
    return LossTerm(x_RT.sum(), "episodes")


def divide(terms: Mapping[str, LossTerm], batch: Batch) -> dict[str, Tensor]:
    """The one division: each sum by the count of its unit over the whole mini-batch, not over the rows at hand."""
    count = {"tokens": int(batch.length_N.sum()), "episodes": len(batch.group_N), "groups": batch.groups}
    return {name: term.sum / max(count[term.unit], 1) for name, term in terms.items()}


def masked_mean(x_RT: Tensor, mask_RT: Tensor) -> float:
    return float(x_RT[mask_RT].double().mean()) if bool(mask_RT.any()) else 0.0


def effective_sample_size(weights: Tensor) -> float:
    """(Σw)² / (n Σw²): the share of the samples that still counts; 1 on-policy."""
    w = weights.double().flatten()
    return float(w.sum() ** 2 / (len(w) * (w**2).sum())) if len(w) and bool((w != 0).any()) else 0.0
