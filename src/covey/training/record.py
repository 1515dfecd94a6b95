"""What a step leaves behind: its figures, some of its episodes token by token, and one to show."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from covey.protocols import Metrics
from covey.telemetry import EpisodeView, TokenRow, episode_record
from covey.training.step import StepResult
from covey.types import Episode, Group, Samples, StopReason, cut_metric


@dataclass(frozen=True, repr=False)
class Step:
    """A training step that was made, as `for step in trainer` gives it."""

    index: int  # from 0
    metrics: Metrics  # as in metrics.jsonl (docs/metrics.md)
    groups: tuple[Group, ...]  # the attempts at each task that were learned from

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """All attempts: `messages` and `final_answer` are text, `rewards` the scores, `turns` the tokens."""
        return tuple(episode for group in self.groups for episode in group.episodes)

    def __repr__(self) -> str:
        reward = self.metrics["reward/mean"]
        return f"Step(index={self.index}, reward/mean={reward:.4g}, {len(self.episodes)} episodes)"


def step_metrics(result: StepResult) -> Metrics:
    samples, collected = result.samples, result.collected
    episodes = [e for g in collected.groups for e in g.episodes]
    reward = samples.total_reward().double()
    values = result.advantages.values.double()
    advantage = values if values.dim() == 1 or not samples.mask_RT.any() else values[samples.mask_RT]
    lengths = [episode.response_tokens for episode in episodes]
    flat = sum(1 for number in range(samples.groups) if len(reward[samples.group_N == number].unique()) == 1)
    found: Metrics = {
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
        "groups/flat": flat / samples.groups,
        "groups/filtered": float(len(collected.zero_variance)),
        "groups/refills": float(collected.refills),
    }
    for name, scored in _columns(result, episodes).items():
        found[f"reward/{name}/mean"] = statistics.fmean(scored)
        found[f"reward/{name}/std"] = statistics.pstdev(scored)
        found |= {f"reward/{name}/min": min(scored), f"reward/{name}/max": max(scored)}
    if collected.reused:
        found["groups/reused"] = float(collected.reused)
    if collected.zero_variance:
        found["reward/unfiltered_mean"] = _unfiltered_mean(samples)
    found |= {f"episodes/failed/{cause}": float(count) for cause, count in collected.failures.items()}
    found |= {cut_metric(limit): count / collected.attempts for limit, count in collected.cut.items()}
    if any(len(episode.turns) > 1 or episode.tools for episode in episodes):
        found |= turn_metrics(episodes)
    return found | result.metrics


def turn_metrics(episodes: Sequence[Episode]) -> Metrics:
    """What agents did: their turns, their tools, the mistakes they made with them, and the time that took."""
    turns = [len(episode.turns) for episode in episodes]
    uses = [use for episode in episodes for use in episode.tools]
    errors = Counter(use.error for use in uses if use.error is not None)
    stops = Counter(str(episode.stop) for episode in episodes)
    found: Metrics = {
        "agent/turns_mean": statistics.fmean(turns),
        "agent/turns_max": float(max(turns)),
        "agent/tool_calls": len(uses) / len(episodes),
        "agent/tool_errors": sum(errors.values()) / max(1, len(uses)),
        "timing/tools": sum(use.seconds for use in uses),
        "timing/slowest_episode": max(episode.seconds for episode in episodes),
    }
    found |= {f"agent/stop/{reason}": count / len(episodes) for reason, count in stops.items()}
    known = [use.tool for use in uses if use.error not in ("malformed", "unknown_tool")]  # not names a model made up
    found |= {f"agent/tool/{tool}": float(count) for tool, count in Counter(known).items()}
    return found | {f"agent/error/{kind}": float(count) for kind, count in errors.items()}


def _columns(result: StepResult, episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Every reward and extra, and what the algorithm added (overlong): the scores that were given."""
    names = dict.fromkeys(name for episode in episodes for name in episode.rewards)
    found = {name: [s for e in episodes if (s := e.rewards.get(name)) is not None] for name in names}
    added = {name: column.tolist() for name, column in result.samples.rewards.items() if name not in found}
    return {name: scored for name, scored in (found | added).items() if scored}


def _unfiltered_mean(samples: Samples) -> float:
    """Mean total reward with the groups that were set aside: what the policy really earns."""
    assert samples.seen is not None
    columns = samples.seen.rewards.items()
    return sum(samples.weights[name] * float(column.nan_to_num(nan=0.0).mean()) for name, column in columns)


def step_episodes(
    result: StepResult, index: int, limit: int, decode: Callable[[list[int]], str]
) -> list[dict[str, object]]:
    """Attempts at one task of the step, another place in the batch each step."""
    number = index % len(result.collected.groups)
    first = sum(len(group.episodes) for group in result.collected.groups[:number])
    group = result.collected.groups[number]
    return [
        _record(result, index, number, attempt, first + attempt, decode)
        for attempt in range(min(limit, len(group.episodes)))
    ]


def _record(
    result: StepResult, index: int, number: int, attempt: int, place: int, decode: Callable[[list[int]], str]
) -> dict[str, object]:
    group, samples, trace = result.collected.groups[number], result.samples, result.trace
    episode = group.episodes[attempt]
    rows = [
        TokenRow(
            row,
            *(column[at, : len(row.response_ids)].tolist() for column in (trace.advantage, trace.ratio, trace.entropy)),
        )
        for at, row in enumerate(samples.rows)
        if row.episode == place
    ]
    return episode_record(
        step=index,
        task_id=group.task.id,
        group=number,
        attempt=attempt,
        episode=episode,
        rewards=episode.rewards,
        total_reward=float(samples.total_reward()[place]),
        advantage=_episode_advantage(result, place),
        tokens=rows,
        decode=decode,
    )


def _episode_advantage(result: StepResult, place: int) -> float:
    """Of the episode, or where an estimator is token-level the mean over its sampled tokens."""
    values = result.advantages.values
    if values.dim() == 1:
        return float(values[place])
    mine = (result.samples.episode_R == place)[:, None] & result.samples.mask_RT
    return float(values[mine].mean())


def step_view(result: StepResult, index: int) -> EpisodeView:
    number = index % len(result.collected.groups)
    place = sum(len(group.episodes) for group in result.collected.groups[:number])
    reward = float(result.samples.total_reward()[place])
    return episode_view(result.collected.groups[number].episodes[0], reward, _episode_advantage(result, place))


def episode_view(episode: Episode, reward: float | None, advantage: float | None = None) -> EpisodeView:
    asked = [m for m in episode.task.messages if m["role"] == "user"]
    return EpisodeView(
        question=str(asked[-1]["content"]) if asked else "",
        reply=episode.final_answer,
        reward=reward,
        advantage=advantage,
        answer=None if episode.task.answer is None else str(episode.task.answer),
    )
