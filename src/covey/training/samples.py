"""Converts groups of episodes to token rows, and these to mini-batches of whole groups.

Shapes: N episodes, R rows, T response tokens, K turns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from covey.algorithms.ops import make_batch
from covey.protocols import Advantages
from covey.rollout.roles import names_roles, split_roles
from covey.types import Batch, Collected, Episode, Group, Sample, Samples, StopReason, Turn, Turns, Unfiltered


def to_samples(
    collected: Collected,
    weights: Mapping[str, float],
    *,
    turns: bool = False,
    temperature: float = 1.0,
    max_tokens: int = 1,
) -> Samples:
    """All episodes of a step as columns; with `turns`, also their turns. If a reward names roles, an episode counts
    once for each trained role. Failed episodes have already been removed from their groups."""
    groups: Sequence[Group] = collected.groups
    all_groups: Sequence[Group] = (*collected.groups, *collected.zero_variance)
    roles: Sequence[tuple[int, str]] = ()
    task_N: Tensor | None = None
    if names_roles(all_groups, weights):
        split, owners = split_roles(groups, weights)
        if split:  # otherwise no trained role has spoken, and there is nothing to learn from
            number = [at for at, group in enumerate(groups) for _ in group.episodes]
            task_N = torch.tensor([number[episode] for episode, _ in owners]).unique_consecutive(return_inverse=True)[1]
            groups, roles, all_groups = split, owners, split_roles(all_groups, weights)[0]
    episodes = [episode for group in groups for episode in group.episodes]
    rows = [row for index, episode in enumerate(episodes) for row in episode_rows(episode, index)]
    return Samples(
        rows=tuple(rows),
        **_episode_columns(groups, weights),
        weights=dict(weights),
        episode_R=torch.tensor([row.episode for row in rows], dtype=torch.int64),
        mask_RT=_pad([row.mask for row in rows], torch.bool),
        old_logprobs_RT=_pad([row.logprobs for row in rows], torch.float32),
        baseline_rewards_G=_baseline_rewards(groups, weights),
        unfiltered=Unfiltered(**_episode_columns(all_groups, weights)) if collected.zero_variance else None,
        turns=_turns(groups, rows, weights.get("given", 0.0)) if turns else None,
        roles=tuple(roles),
        task_N=task_N,
        temperature=temperature,
        max_tokens=max_tokens,
    )


def _episode_columns(groups: Sequence[Group], weights: Mapping[str, float]) -> dict[str, Any]:
    episodes = [episode for group in groups for episode in group.episodes]
    return {
        "group_N": torch.tensor([g for g, group in enumerate(groups) for _ in group.episodes], dtype=torch.int64),
        "rewards": {name: _scores(episodes, name) for name in weights},
        "longest_N": torch.tensor([max(len(turn.completion_ids) for turn in e.turns) for e in episodes]),
        "truncated_N": torch.tensor([e.stop is StopReason.LENGTH for e in episodes]),
    }


def _scores(episodes: Sequence[Episode], name: str) -> Tensor:
    """The scores of one reward, [N]; NaN if it is missing."""
    values = [episode.rewards.get(name) for episode in episodes]
    return torch.tensor([float("nan") if v is None else v for v in values], dtype=torch.float64)


def _baseline_rewards(groups: Sequence[Group], weights: Mapping[str, float]) -> Tensor | None:
    """The total reward of each group's greedy attempt, [G]; None if there are no greedy attempts."""
    baselines = [group.baseline for group in groups if group.baseline is not None]
    if not baselines:
        return None
    columns = [weight * _scores(baselines, name).nan_to_num(nan=0.0) for name, weight in weights.items()]
    return torch.stack(columns).sum(0)


def _turns(groups: Sequence[Group], rows: Sequence[Sample], weight: float) -> Turns:
    """All turns, also those that are not trained on. `weight`: of the reward `given`, which contains their rewards."""
    numbered = [(g, episode) for g, group in enumerate(groups) for episode in group.episodes]
    places = [(at, n) for at, (_, episode) in enumerate(numbered) for n in range(len(episode.turns))]
    keys: dict[tuple[int, Any], int] = {}
    for g, episode in numbered:
        for turn in episode.turns:
            keys.setdefault((g, _state(turn)), len(keys))
    first = [0, *itertools.accumulate(len(episode.turns) for _, episode in numbered)]
    turn_RT = torch.full((len(rows), max(len(row.mask) for row in rows)), -1)
    for r, row in enumerate(rows):
        for number, start, end in row.turns:
            turn_RT[r, start:end] = first[row.episode] + number
    rewards = [weight * reward for _, episode in numbered for reward in _turn_rewards(episode)]
    return Turns(
        episode_K=torch.tensor([at for at, _ in places]),
        number_K=torch.tensor([number for _, number in places]),
        reward_K=torch.tensor(rewards, dtype=torch.float64),
        state_K=torch.tensor([keys[g, _state(turn)] for g, episode in numbered for turn in episode.turns]),
        turn_RT=turn_RT,
    )


def _state(turn: Turn) -> str | tuple[tuple[int, ...], tuple[str, ...]]:
    """The named state, or else the prompt: its tokens and images."""
    if turn.state is not None:
        return turn.state
    return turn.prompt_ids, tuple(span.image.digest for span in turn.images)


def _turn_rewards(episode: Episode) -> list[float]:
    """The reward that each turn received, NaN if none; 0 if rewards of the episode do not count."""
    counts = episode.counts_reported
    return [math.nan if turn.reward is None else turn.reward * counts for turn in episode.turns]


def episode_rows(episode: Episode, index: int) -> list[Sample]:
    """The token rows of an episode. A turn extends the row before it if its prompt continues that row token for token,
    else it starts a new row. Rows without trained tokens are dropped."""
    rows: list[Sample] = []
    for number, turn in enumerate(episode.turns):
        sampled = Sample(
            prompt_ids=turn.prompt_ids,
            response_ids=turn.completion_ids,
            mask=(turn.trained,) * len(turn.completion_ids),
            logprobs=turn.logprobs,
            versions=turn.versions,
            episode=index,
            images=turn.images,
            turns=((number, 0, len(turn.completion_ids)),),
        )
        earlier_ids = rows[-1].prompt_ids + rows[-1].response_ids if rows else None
        if (
            earlier_ids is not None
            and turn.prompt_ids[: len(earlier_ids)] == earlier_ids
            and turn.images[: len(rows[-1].images)] == rows[-1].images
        ):
            rows[-1] = _append_turn(rows[-1], turn.prompt_ids[len(earlier_ids) :], sampled)
        else:
            rows.append(sampled)
    return [row for row in rows if any(row.mask)] or rows[:1]


def _append_turn(row: Sample, between: tuple[int, ...], sampled: Sample) -> Sample:
    """Extend a row by tokens that were not sampled (a tool's result, the chat template) and a sampled completion."""
    gap = len(between)
    start = len(row.response_ids) + gap
    return Sample(
        prompt_ids=row.prompt_ids,
        response_ids=row.response_ids + between + sampled.response_ids,
        mask=row.mask + (False,) * gap + sampled.mask,
        logprobs=row.logprobs + (0.0,) * gap + sampled.logprobs,
        versions=row.versions + (-1,) * gap + sampled.versions,
        episode=row.episode,
        images=sampled.images,
        turns=(*row.turns, *((number, start + a, start + b) for number, a, b in sampled.turns)),
    )


def minibatches(
    samples: Samples, advantages: Advantages, *, groups_per_batch: int | None, epochs: int
) -> Iterator[Batch]:
    """Mini-batches of whole groups in task order, `epochs` times over. The groups of a task's roles stay together, and
    count as one."""
    task_N = samples.tasks()
    tasks = int(task_N.max()) + 1
    size = groups_per_batch or tasks
    for epoch in range(epochs):
        for start in range(0, tasks, size):
            yield _batch(samples, advantages, (task_N >= start) & (task_N < start + size), epoch)


def _batch(samples: Samples, advantages: Advantages, chosen_N: Tensor, epoch: int) -> Batch:
    episodes = chosen_N.nonzero()[:, 0]
    row_R = chosen_N[samples.episode_R].nonzero()[:, 0]
    values = advantages.values
    per_token = values[samples.episode_R][:, None].expand(samples.mask_RT.shape) if values.dim() == 1 else values
    return make_batch(
        rows=tuple(samples.rows[i] for i in row_R.tolist()),
        group_N=samples.group_N[episodes] - samples.group_N[episodes[0]],
        rewards_N=samples.total_reward()[episodes],
        episode_R=samples.episode_R[row_R] - episodes[0],  # the episodes of consecutive groups are contiguous
        row_R=row_R,
        mask_RT=samples.mask_RT[row_R],
        old_logprobs_RT=samples.old_logprobs_RT[row_R],
        ref_logprobs_RT=None if samples.ref_logprobs_RT is None else samples.ref_logprobs_RT[row_R],
        advantages_RT=per_token[row_R].to(samples.old_logprobs_RT.dtype),
        returns_RT=None if advantages.returns is None else advantages.returns[row_R],
        values_RT=None if samples.values_RT is None else samples.values_RT[row_R],
        teacher_top=None if samples.teacher_top is None else samples.teacher_top[row_R],
        temperature=samples.temperature,
        max_tokens=samples.max_tokens,
        epoch=epoch,
    )


def _pad(rows: Sequence[Sequence[float | bool]], dtype: torch.dtype) -> Tensor:
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded
