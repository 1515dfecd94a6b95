"""Functions shared by the algorithms: group statistics, sums over tokens, timelines and turns of episodes, diagnostics.

Shapes: N episodes, G groups, R rows, T response tokens, K turns. `group` holds 0..G-1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from covey.imports import torch
from covey.protocols import TokenOutputs
from covey.types import Batch, Sample, Samples, Turns

if TYPE_CHECKING:
    from torch import Tensor


def group_sum(x_N: Tensor, group_N: Tensor) -> Tensor:
    """Sum over each group, for each of its members: [N] → [N]. Groups are numbered from 0 and none is empty, so their
    number is at most N; counting them would wait for a GPU."""
    return x_N.new_zeros(len(group_N)).index_add(0, group_N, x_N)[group_N]


def group_size(group_N: Tensor, dtype: torch.dtype | None = None, valid_N: Tensor | None = None) -> Tensor:
    """Size of each episode's group, [N], float64 by default; with `valid_N`, only valid members count."""
    dtype = dtype or torch.float64
    ones_N = torch.ones_like(group_N, dtype=dtype) if valid_N is None else valid_N.to(dtype)
    return group_sum(ones_N, group_N)


def group_mean(x_N: Tensor, group_N: Tensor, valid_N: Tensor | None = None) -> Tensor:
    kept_N = x_N if valid_N is None else torch.where(valid_N, x_N, torch.zeros_like(x_N))
    return group_sum(kept_N, group_N) / group_size(group_N, x_N.dtype, valid_N).clamp(min=1)


def group_std(x_N: Tensor, group_N: Tensor, valid_N: Tensor | None = None) -> Tensor:
    """Unbiased standard deviation of each group; 0 for a group of one. A spread within rounding error counts as exactly
    zero, so that constant rewards of 0.1 have no signal."""
    valid_N = torch.ones_like(x_N, dtype=torch.bool) if valid_N is None else valid_N
    x_N = torch.where(valid_N, x_N, torch.zeros_like(x_N))
    off_N = torch.where(valid_N, x_N - group_mean(x_N, group_N, valid_N), torch.zeros_like(x_N))
    std_N = (group_sum(off_N**2, group_N) / (group_size(group_N, x_N.dtype, valid_N) - 1).clamp(min=1)).sqrt()
    largest_G = x_N.new_zeros(len(group_N)).scatter_reduce(0, group_N, x_N.abs(), "amax")
    return torch.where(std_N <= _rounding(x_N.dtype) * largest_G[group_N], torch.zeros_like(std_N), std_N)


def mean_spread(x_N: Tensor, group_N: Tensor, valid_N: Tensor) -> float:
    """The unbiased standard deviation within a group, averaged over groups with two or more valid members."""
    _, group_N = group_N.unique(return_inverse=True)
    size_N = group_size(group_N, valid_N=valid_N)
    share_N = torch.where(valid_N & (size_N > 1), 1 / size_N.clamp(min=1), torch.zeros_like(size_N))
    groups = float(share_N.sum())
    return float((group_std(x_N.double(), group_N, valid_N) * share_N).sum()) / groups if groups else 0.0


def normalised(x_N: Tensor, group_N: Tensor, epsilon: float, valid_N: Tensor | None = None) -> Tensor:
    """(x − mean) / (std + ε) over each group; 0 if the group has no spread or x is not valid."""
    std_N = group_std(x_N, group_N, valid_N)
    # If the spread is only rounding error, so is the centred value.
    keep_N = (std_N > 0) if valid_N is None else (std_N > 0) & valid_N
    # Divide inside `where`: with ε = 0 a group without spread would be 0/0.
    return torch.where(keep_N, (x_N - group_mean(x_N, group_N, valid_N)) / (std_N + epsilon), torch.zeros_like(x_N))


def mean_and_variance(x_N: Tensor, group_N: Tensor) -> tuple[float, float]:
    """Mean of the group means, and the mean variance within groups plus the variance of their means (population)."""
    mean_N, share_N = group_mean(x_N, group_N), 1 / group_size(group_N)  # every group counts once
    groups = share_N.sum()
    mean = (mean_N * share_N).sum() / groups
    return float(mean), float((((x_N - mean_N) ** 2 + (mean_N - mean) ** 2) * share_N).sum() / groups)


def centred(x_N: Tensor, group_N: Tensor) -> Tensor:
    """x − mean over each group; exactly 0 if the group has no spread, as a group of one."""
    return torch.where(group_std(x_N, group_N) > 0, x_N - group_mean(x_N, group_N), torch.zeros_like(x_N))


def whiten(x: Tensor, weight: Tensor) -> Tensor:
    """Mean 0 and variance 1 over elements with multiplicity `weight`: a token mask, or tokens per episode."""
    weight = weight.to(x.dtype)
    x = torch.where(weight > 0, x, torch.zeros_like(x))
    count = weight.sum()
    mean = (x * weight).sum() / count.clamp(min=1)
    std = ((weight * (x - mean) ** 2).sum() / (count - 1).clamp(min=1)).sqrt()
    if not x.numel() or bool(std <= _rounding(x.dtype) * x.abs().max()):
        return torch.zeros_like(x)
    return torch.where(weight > 0, (x - mean) / (std**2 + 1e-8).sqrt(), torch.zeros_like(x))


def _rounding(dtype: torch.dtype) -> float:
    return max(1e-8, 4 * torch.finfo(dtype).eps)


def episode_sum(x_RT: Tensor, mask_RT: Tensor, episode_R: Tensor, episodes: int) -> Tensor:
    """Masked sum over the tokens of all rows of an episode: [R, T] → [N]."""
    sums_R = torch.where(mask_RT, x_RT, torch.zeros_like(x_RT)).sum(-1)
    return sums_R.new_zeros(episodes).index_add(0, episode_R, sums_R)


def token_rewards(samples: Samples) -> Tensor:
    """Reward per token, [R, T]: a turn's reward is on its last sampled token, that of a turn without any on the token
    before it; the rest of the episode's reward is on the episode's last sampled token."""
    places_NL, valid_NL = timeline(samples.mask_RT, samples.episode_R, samples.episodes)
    reward_N = samples.outcome_reward()
    reward_RT = torch.zeros_like(samples.mask_RT, dtype=reward_N.dtype)
    turns = samples.turns
    if turns is not None and bool((turns.reward_K.nan_to_num(nan=0.0) != 0).any()):
        reward_N = unpaid_reward(samples, turns)
        length_K = torch.bincount(turns.turn_RT[samples.mask_RT], minlength=len(turns.episode_K))
        before_N = valid_NL.sum(-1).cumsum(0) - valid_NL.sum(-1)
        last_K = length_K.cumsum(0) - before_N[turns.episode_K] - 1  # its column in the timeline
        kept_K = last_K >= 0  # no token precedes the others, so none earned them
        last_K = places_NL[turns.episode_K[kept_K], last_K[kept_K]]
        paid_K = turns.reward_K[kept_K].nan_to_num(nan=0.0).to(reward_N.dtype)
        reward_RT.view(-1).index_add_(0, last_K, paid_K)
    has_N = valid_NL.any(-1)
    last_N = places_NL[has_N, valid_NL.sum(-1)[has_N] - 1]
    reward_RT.view(-1)[last_N] += reward_N[has_N]
    if samples.token_rewards_RT is not None:
        reward_RT = reward_RT + samples.token_rewards_RT
    return reward_RT


def timeline(mask_RT: Tensor, episode_R: Tensor, episodes: int) -> tuple[Tensor, Tensor]:
    """The sampled tokens of each episode in sampling order, across tool turns and forked rows: [N, L] indices into the
    flattened [R, T] layout, and which of them are valid."""
    place_M = mask_RT.flatten().nonzero()[:, 0]
    owner_M, order = episode_R[place_M // mask_RT.shape[1]].sort(stable=True)
    place_M = place_M[order]
    count_N = torch.bincount(owner_M, minlength=episodes)
    column_M = torch.arange(len(place_M), device=place_M.device) - (count_N.cumsum(0) - count_N)[owner_M]
    places_NL = place_M.new_zeros(episodes, int(count_N.max()) if episodes else 0)
    places_NL[owner_M, column_M] = place_M
    return places_NL, torch.arange(places_NL.shape[1], device=place_M.device) < count_N[:, None]


def to_timeline(x_RT: Tensor, places_NL: Tensor, valid_NL: Tensor) -> Tensor:
    """Token values in the order of the timeline: [R, T] → [N, L], 0 beyond the end."""
    return torch.where(valid_NL, x_RT.flatten()[places_NL], x_RT.new_zeros(()))


def from_timeline(x_NL: Tensor, places_NL: Tensor, valid_NL: Tensor, like_RT: Tensor) -> Tensor:
    """The inverse of to_timeline: [N, L] → [R, T], 0 for tokens that were not sampled."""
    x_RT = x_NL.new_zeros(like_RT.shape)
    x_RT.view(-1)[places_NL[valid_NL]] = x_NL[valid_NL]
    return x_RT


def backward_sum(x_NL: Tensor, discount: float | Tensor) -> Tensor:
    """G_t = x_t + discount_t · G_{t+1}, with one discount or one for each t, [N, L]."""
    total_N = x_NL.new_zeros(len(x_NL))
    sum_NL = torch.zeros_like(x_NL)
    for t in range(x_NL.shape[1] - 1, -1, -1):
        total_N = x_NL[:, t] + (discount if isinstance(discount, int | float) else discount[:, t]) * total_N
        sum_NL[:, t] = total_N
    return sum_NL


# -- Turns -------------------------------------------------------------------------------------------------------------


def turns_of(samples: Samples) -> Turns:
    """The turns of the step; without any, each episode is one turn, and the first states of a group are equal."""
    if samples.turns is not None:
        return samples.turns
    episode_K = torch.arange(samples.episodes, device=samples.group_N.device)
    return Turns(
        episode_K=episode_K,
        number_K=torch.zeros_like(episode_K),
        reward_K=torch.full_like(episode_K, torch.nan, dtype=torch.float64),
        state_K=samples.group_N,
        turn_RT=samples.episode_R[:, None].expand(samples.mask_RT.shape),
    )


def unpaid_reward(samples: Samples, turns: Turns) -> Tensor:
    """The part of each episode's outcome reward that no turn received, [N]."""
    outcome_N, paid_K = samples.outcome_reward(), turns.reward_K.nan_to_num(nan=0.0)
    sum_N, size_N = paid_K.new_zeros(2, samples.episodes).index_add(
        1, turns.episode_K, torch.stack([paid_K, paid_K.abs()])
    )
    rest_N = outcome_N.double() - sum_N
    # A difference within rounding would become a signal: an estimator may divide by its spread.
    rounding_N = _rounding(outcome_N.dtype) * (outcome_N.double().abs() + size_N)
    return torch.where((size_N > 0) & (rest_N.abs() <= rounding_N), 0.0, rest_N).to(outcome_N.dtype)


def turn_rewards(samples: Samples, turns: Turns) -> Tensor:
    """The reward of each turn, [K], with those of its tokens; what no turn received is on the last one. Their
    sum over an episode is its total reward."""
    rest_N = unpaid_reward(samples, turns)
    reward_K = turns.reward_K.nan_to_num(nan=0.0).to(rest_N.dtype)
    last_N = torch.bincount(turns.episode_K, minlength=samples.episodes).cumsum(0) - 1
    reward_K = reward_K.index_add(0, last_N, rest_N)
    if samples.token_rewards_RT is None:
        return reward_K
    inside_RT = samples.mask_RT & (turns.turn_RT >= 0)
    return reward_K.index_add(0, turns.turn_RT[inside_RT], samples.token_rewards_RT[inside_RT].to(reward_K.dtype))


def returns_to_go(reward_K: Tensor, turns: Turns, discount: float) -> Tensor:
    """G_t = r_t + discount · G_{t+1} over the turns of each episode, [K]."""
    count_N = torch.bincount(turns.episode_K)
    reward_NL = reward_K.new_zeros(len(count_N), int(count_N.max()) if len(count_N) else 0)
    reward_NL[turns.episode_K, turns.number_K] = reward_K
    return backward_sum(reward_NL, discount)[turns.episode_K, turns.number_K]


def to_tokens(x_K: Tensor, turns: Turns, mask_RT: Tensor) -> Tensor:
    """Each sampled token gets its turn's value: [K] → [R, T], 0 elsewhere."""
    return torch.where(mask_RT, x_K[turns.turn_RT.clamp(min=0)], x_K.new_zeros(()))


def labels(*columns_K: Tensor) -> Tensor:
    """0, 1, … for the distinct combinations of the columns' values, [K]."""
    return torch.stack(columns_K).unique(dim=1, return_inverse=True)[1]


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
    """A whole mini-batch, with its sums over tokens."""

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


def probability_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """π / π_old per token. Log-ratios are clamped to ±20, beyond which exp would overflow sums."""
    return torch.exp((logprobs - old_logprobs).clamp(-20, 20))


def policy_sum(out: TokenOutputs, batch: Batch) -> Tensor:
    """Σ log π of every episode of the mini-batch, without gradient. If the micro-batch holds only parts of episodes or
    groups, the sums come from a first pass over the mini-batch; otherwise from its own rows."""
    if batch.policy_sum_N is not None:
        return batch.policy_sum_N
    return episode_sum(out.logprobs.detach(), batch.mask_RT, batch.episode_R, len(batch.group_N))


def masked_sum(x_RT: Tensor, mask_RT: Tensor) -> Tensor:
    """Σ over the mask. Selecting by the mask would wait for the GPU to count it."""
    return torch.where(mask_RT, x_RT, torch.zeros_like(x_RT)).sum()


def masked_mean(x_RT: Tensor, mask_RT: Tensor) -> float:
    return float(x_RT[mask_RT].double().mean()) if bool(mask_RT.any()) else 0.0


def effective_sample_size(weights: Tensor) -> float:
    """(Σw)² / (n Σw²): effective sample size as a share of the samples; 1 on-policy."""
    w = weights.double().flatten()
    return float(w.sum() ** 2 / (len(w) * (w**2).sum())) if len(w) and bool((w != 0).any()) else 0.0


def simplex_with_floor(weights: list[float], floor: float) -> list[float]:
    """The nearest point with Σ w = 1 and every w ≥ floor: all are lowered by the same amount, or stay at the floor."""
    mass, above = 1 - floor * len(weights), sorted((w - floor for w in weights), reverse=True)
    total, shift = 0.0, 0.0
    for count, height in enumerate(above, start=1):
        total += height
        if count == 1 or height - (total - mass) / count > 0:
            shift = (total - mass) / count
    return [floor + max(w - floor - shift, 0.0) for w in weights]
