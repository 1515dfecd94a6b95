"""Records of a training step: the `Step` that users see, episodes token by token, and one episode for the console."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from covey.images import plain_text
from covey.protocols import Metrics
from covey.telemetry import EpisodeView, TokenRow, episode_record
from covey.training.step import StepResult
from covey.types import Episode, Group


@dataclass(frozen=True, repr=False)
class Step:
    """A finished training step, as `for step in trainer` yields it."""

    index: int  # from 0
    metrics: Metrics  # as in metrics.jsonl (docs/metrics.md)
    groups: tuple[Group, ...]  # the attempts at each task that were trained on

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """All attempts: `messages` and `final_answer` are text, `rewards` the scores, `turns` the tokens."""
        return tuple(episode for group in self.groups for episode in group.episodes)

    def __repr__(self) -> str:
        reward = self.metrics["reward/mean"]
        return f"Step(index={self.index}, reward/mean={reward:.4g}, {len(self.episodes)} episodes)"


def step_episodes(
    result: StepResult, index: int, limit: int, decode: Callable[[list[int]], str]
) -> list[dict[str, object]]:
    """Up to `limit` attempts at one task of the step, for episodes.jsonl. The task rotates with the step index."""
    samples, trace = result.samples, result.trace
    number, first = _shown_group(result, index)
    group = result.collected.groups[number]
    records = []
    for attempt, episode in enumerate(group.episodes[:limit]):
        own = _members(result, first + attempt)
        rows = [
            TokenRow(
                row, *(x[r, : len(row.response_ids)].tolist() for x in (trace.advantage, trace.ratio, trace.entropy))
            )
            for r, row in enumerate(samples.rows)
            if row.episode in own
        ]
        records.append(
            episode_record(
                step=index,
                task_id=group.task.id,
                group=number,
                attempt=attempt,
                episode=episode,
                rewards=episode.rewards,
                total_reward=_total_reward(result, own, episode),
                advantage=_episode_advantage(result, own),
                tokens=rows,
                decode=decode,
            )
        )
    return records


def step_view(result: StepResult, index: int) -> EpisodeView:
    """The first attempt at the same task, for the console."""
    number, first = _shown_group(result, index)
    own, episode = _members(result, first), result.collected.groups[number].episodes[0]
    return episode_view(episode, _total_reward(result, own, episode), _episode_advantage(result, own))


def _shown_group(result: StepResult, index: int) -> tuple[int, int]:
    """The number of the group that is recorded for this step, and the index of its first episode."""
    groups = result.collected.groups
    number = index % len(groups)
    return number, sum(len(group.episodes) for group in groups[:number])


def _members(result: StepResult, at: int) -> list[int]:
    """The indices in the samples of an episode of the step: one, or one for each of its trained roles, maybe none."""
    roles = result.samples.roles
    return [n for n, (episode, _) in enumerate(roles) if episode == at] if roles else [at]


def _total_reward(result: StepResult, own: list[int], episode: Episode) -> float:
    """The mean over the roles of an episode; without a trained role, the weighted sum of its scores."""
    if own:
        return float(result.samples.total_reward()[own].mean())
    return sum(weight * (episode.rewards.get(name) or 0.0) for name, weight in result.samples.weights.items())


def _episode_advantage(result: StepResult, own: list[int]) -> float | None:
    """The advantage of an episode, the mean over its roles; for a token-level estimator, the mean over its sampled
    tokens. None without a trained role."""
    if not own:
        return None
    values = result.advantages.values
    if values.dim() == 1:
        return float(values[own].mean())
    own_RT = torch.isin(result.samples.episode_R, torch.tensor(own))[:, None] & result.samples.mask_RT
    return float(values[own_RT].mean())


def episode_view(episode: Episode, reward: float | None, advantage: float | None = None) -> EpisodeView:
    questions = [m for m in episode.task.messages if m["role"] == "user"]
    return EpisodeView(
        question=plain_text(questions[-1]["content"]) if questions else "",
        reply=episode.final_answer,
        reward=reward,
        advantage=advantage,
        answer=None if episode.task.answer is None else str(episode.task.answer),
    )
