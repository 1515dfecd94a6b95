"""Metrics of a training step (docs/metrics.md)."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch

from covey.protocols import Metrics, TokenTrace
from covey.types import Episode, Samples, StopReason, cut_metric

if TYPE_CHECKING:
    from covey.training.step import StepResult


def step_metrics(result: StepResult) -> Metrics:
    """The metrics of a step: rewards, advantages, responses, groups, agents and updates."""
    samples, collected = result.samples, result.collected
    episodes = [e for g in collected.groups for e in g.episodes]
    reward = samples.total_reward().double()
    values = result.advantages.values.double()
    advantage = values if values.dim() == 1 or not samples.mask_RT.any() else values[samples.mask_RT]
    lengths = [episode.response_tokens for episode in episodes]
    zero_variance = sum(len(reward[samples.group_N == group].unique()) == 1 for group in range(samples.groups))
    metrics: Metrics = {
        "reward/mean": float(reward.mean()),
        "reward/std": float(reward.std(unbiased=False)),
        "reward/min": float(reward.min()),
        "reward/max": float(reward.max()),
        "train/reward": float(reward.mean()),
        "advantage/mean": float(advantage.mean()),
        "advantage/std": float(advantage.std(unbiased=False)),
        "train/advantage": float(advantage.mean()),
        "response/length_mean": sum(lengths) / len(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated": sum(e.stop is StopReason.LENGTH for e in episodes) / len(episodes),
        "episodes/total": float(len(episodes)),
        "episodes/failed": float(sum(collected.failures.values())),
        "episodes/cut": sum(collected.cut.values()) / max(1, collected.attempts),
        "groups/total": float(samples.groups),
        "groups/dropped": float(collected.dropped),
        "groups/flat": zero_variance / samples.groups,
        "groups/filtered": float(len(collected.zero_variance)),
        "groups/refills": float(collected.refills),
    }
    for name, scored in _scores(result, episodes).items():
        metrics[f"reward/{name}/mean"] = statistics.fmean(scored)
        metrics[f"reward/{name}/std"] = statistics.pstdev(scored)
        metrics |= {f"reward/{name}/min": min(scored), f"reward/{name}/max": max(scored)}
    for role in dict.fromkeys(role for _, role in samples.roles):
        own_N = torch.tensor([other == role for _, other in samples.roles])
        metrics |= {f"role/{role}/reward": float(reward[own_N].mean()), f"role/{role}/episodes": float(own_N.sum())}
    metrics |= {**collected.curriculum, **collected.opponent}
    if collected.reused:
        metrics["groups/reused"] = float(collected.reused)
    if collected.zero_variance:
        metrics["reward/unfiltered_mean"] = _unfiltered_mean(samples)
    metrics |= {f"episodes/failed/{cause}": float(count) for cause, count in collected.failures.items()}
    metrics |= {cut_metric(limit): count / collected.attempts for limit, count in collected.cut.items()}
    if any(len(episode.turns) > 1 or episode.tools or episode.turn_rewards for episode in episodes):
        metrics |= turn_metrics(episodes)
    return metrics | result.metrics


def turn_metrics(episodes: Sequence[Episode]) -> Metrics:
    """Turns, tool calls, tool errors and time of agents."""
    turns = [len(episode.turns) for episode in episodes]
    uses = [use for episode in episodes for use in episode.tools]
    errors = Counter(use.error for use in uses if use.error is not None)
    stops = Counter(str(episode.stop) for episode in episodes)
    metrics: Metrics = {
        "agent/turns_mean": statistics.fmean(turns),
        "agent/turns_max": float(max(turns)),
        "agent/tool_calls": len(uses) / len(episodes),
        "agent/tool_errors": sum(errors.values()) / max(1, len(uses)),
        "timing/tools": sum(use.seconds for use in uses),
        "timing/slowest_episode": max(episode.seconds for episode in episodes),
    }
    if paid := [reward for episode in episodes for reward in episode.turn_rewards]:
        metrics |= {
            "reward/turn/mean": statistics.fmean(paid),
            "reward/turn/min": min(paid),
            "reward/turn/max": max(paid),
            "reward/turn/paid": len(paid) / sum(turns),
        }
    metrics |= {f"agent/stop/{reason}": count / len(episodes) for reason, count in stops.items()}
    known = [use.tool for use in uses if use.error not in ("malformed", "unknown_tool")]  # names that exist
    metrics |= {f"agent/tool/{tool}": float(count) for tool, count in Counter(known).items()}
    return metrics | {f"agent/error/{kind}": float(count) for kind, count in errors.items()}


def _scores(result: StepResult, episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """The scores of every reward, including rewards that are only logged and those that the algorithm added
    (overlong)."""
    names = dict.fromkeys(name for episode in episodes for name in episode.rewards)
    scores = {name: [s for e in episodes if (s := e.rewards.get(name)) is not None] for name in names}
    added = {name: column.tolist() for name, column in result.samples.rewards.items() if name not in scores}
    return {name: scored for name, scored in (scores | added).items() if scored}


def _unfiltered_mean(samples: Samples) -> float:
    """Mean total reward of all attempts, including filtered groups."""
    assert samples.unfiltered is not None
    columns = samples.unfiltered.rewards.items()
    return sum(samples.weights[name] * float(column.nan_to_num(nan=0.0).mean()) for name, column in columns)


# -- Metrics of the updates --------------------------------------------------------------------------------------------


def merge_updates(updates: Sequence[Metrics]) -> Metrics:
    """Combine the metrics of a step's optimiser updates: the largest of maxima, the smallest of minima, else the mean.

    Each metric is taken over the updates in which it is finite: a skipped update has no gradient norm, for example.
    Counters keep their last value.
    """
    merged: Metrics = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [value for update in updates if math.isfinite(value := update.get(name, math.nan))]
        words = name.rpartition("/")[2].split("_")
        pick = max if "max" in words else min if "min" in words else None
        merged[name] = math.nan if not values else reduce(pick, values) if pick else sum(values) / len(values)
    return merged | {"optim/skipped": updates[-1]["optim/skipped"], "optim/updates": float(len(updates))}


def policy_age(samples: Samples, version: int) -> Metrics:
    """How many updates ago each trained token was sampled."""
    ages = [version - v for row in samples.rows for v, sampled in zip(row.versions, row.mask, strict=True) if sampled]
    return {"policy/age": sum(ages) / max(1, len(ages)), "policy/age_max": float(max(ages, default=0))}


def engine_mismatch(samples: Samples, trace: TokenTrace, groups_per_batch: int | None) -> Metrics:
    """The difference between the engine's and the learner's log-probs of sampled tokens, under the same weights.

    If the learner did not recompute log-probs before the first update, those of the first mini-batch are used.
    """
    mask_RT = samples.mask_RT
    if samples.sampling_logprobs_RT is not None:
        log_ratio_RT = samples.old_logprobs_RT - samples.sampling_logprobs_RT
    else:
        first_R = samples.tasks()[samples.episode_R] < (groups_per_batch or samples.groups)
        mask_RT = mask_RT & first_R[:, None]
        log_ratio_RT = trace.ratio.where(mask_RT, 1.0).log()
    log_ratio = log_ratio_RT[mask_RT].double()
    if not len(log_ratio):  # every answer is masked
        return {}
    return {
        "rollout/mismatch": float(log_ratio.abs().mean()),
        "rollout/kl": float((log_ratio.exp() - 1 - log_ratio).mean()),
    }
