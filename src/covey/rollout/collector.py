"""From tasks to scored groups: runs an agent on every attempt at once and scores what comes back.

A failure of the infrastructure stays on its episode as data; a model's own mistake is an answer like any other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from covey.errors import InputError, RunFailed
from covey.protocols import Agent, Reward, RolloutEngine
from covey.rollout.policy import ChatTokenizer, EpisodePolicy
from covey.types import Episode, Failure, Group, Sampling, Task

TaskBatch = Callable[[int], Sequence[Task]]


@dataclass(frozen=True)
class Collector:
    """Runs agents on an engine. `seed` names the run's random streams."""

    engine: RolloutEngine
    tokenizer: ChatTokenizer
    agent: Agent
    reward: Reward
    seed: int
    max_seconds: float

    async def groups(
        self, tasks: Sequence[Task], attempts: int, sampling: Sampling, stream: tuple[object, ...]
    ) -> list[Group]:
        """Every task attempted `attempts` times, scored, in task order."""
        jobs = [
            self._attempt(task, sampling, (self.seed, *stream, task.id, attempt))
            for task in tasks
            for attempt in range(attempts)
        ]
        episodes = await asyncio.gather(*jobs)
        groups = [episodes[i : i + attempts] for i in range(0, len(episodes), attempts)]
        if self.reward.groupwise:
            groups = await asyncio.gather(*map(self._score_together, tasks, groups))
        return [Group(task, tuple(group)) for task, group in zip(tasks, groups, strict=True)]

    async def _attempt(self, task: Task, sampling: Sampling, stream: tuple[object, ...]) -> Episode:
        """One episode and its reward, within agent.max_seconds; waiting for the model does not count."""
        deadline = asyncio.timeout(self.max_seconds)
        policy = EpisodePolicy(self.engine, self.tokenizer, sampling, stream, deadline)
        cause = "agent"
        try:
            async with deadline:
                episode = await self.agent.run(policy, task)
                cause = "reward"
                if self.reward.groupwise:
                    return episode
                return replace(episode, rewards=await self.reward(task, episode))
        except TimeoutError:
            cause, message = "timeout", f"the episode took longer than agent.max_seconds={self.max_seconds:g}"
        except InputError:
            raise  # a user's mistake ends the run, it is not one episode's bad luck
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        return Episode(task, tuple(policy.turns), task.messages, failure=Failure(cause, message))

    async def _score_together(self, task: Task, episodes: Sequence[Episode]) -> list[Episode]:
        """Rewards that compare attempts need all of them; if one raises, the whole group is lost."""
        try:
            async with asyncio.timeout(self.max_seconds):
                tables = await self.reward.group(task, episodes)
        except InputError:
            raise
        except Exception as error:
            failure = Failure("reward", f"{type(error).__name__}: {error}")
            return [e if e.failure else replace(e, failure=failure) for e in episodes]
        return [e if e.failure else replace(e, rewards=table) for e, table in zip(episodes, tables, strict=True)]


class TrainingSource:
    """The groups of each training step, one after the other: collection waits for the policy (staleness 0)."""

    def __init__(
        self, collector: Collector, batch: TaskBatch, *, attempts: int, sampling: Sampling, min_group_size: int
    ) -> None:
        self.collector = collector
        self.batch = batch
        self.attempts = attempts
        self.sampling = sampling
        self.min_group_size = min_group_size
        self.step = 0
        self.failures: Counter[str] = Counter()  # of the last step, by cause
        self.examples: dict[str, str] = {}  # a message for each of them
        self.dropped = 0

    async def next(self) -> list[Group]:
        """Groups that can be learned from. Failed episodes leave their group; a group left too small is dropped."""
        raw = await self.collector.groups(self.batch(self.step), self.attempts, self.sampling, ("train", self.step))
        raw = [replace(g, episodes=tuple(map(_unscored_is_failed, g.episodes))) for g in raw]
        failed = [e.failure for g in raw for e in g.episodes if e.failure]
        self.failures = Counter(failure.cause for failure in failed)
        self.examples = {failure.cause: failure.message for failure in failed}
        kept = [replace(g, episodes=tuple(e for e in g.episodes if not e.failure)) for g in raw]
        kept = [g for g in kept if len(g.episodes) >= self.min_group_size]
        self.dropped = len(raw) - len(kept)
        if not kept:
            raise NothingCompleted(_diagnosis(raw, self.failures, self.examples))
        return kept

    def policy_updated(self, version: int) -> None:
        self.step = version


def _unscored_is_failed(episode: Episode) -> Episode:
    """An attempt that no reward scored is not worth 0: it is left out, and counted."""
    if episode.failure is not None or any(score is not None for score in episode.rewards.values()):
        return episode
    return replace(episode, failure=Failure("unscored", "every reward returned None"))


class NothingCompleted(RunFailed):
    """Every group of a step was lost."""


_LIKELY_FIX = {
    "timeout": "raise agent.max_seconds, or lower rollout.max_tokens",
    "reward": "run the reward on one episode by hand; it raised on every answer",
    "unscored": "return a number from the reward; None means that an attempt cannot be scored",
    "agent": "the agent raised on every attempt; try it on one task with covey sample",
}


def _diagnosis(raw: Sequence[Group], failures: Counter[str], examples: dict[str, str]) -> str:
    lines = [f"No training tasks completed: {len(raw)} groups of {len(raw[0].episodes)} attempts were all lost"]
    for cause, count in failures.most_common():
        lines += [
            f"  {count} × {cause}: {examples[cause]}",
            f"      likely fix: {_LIKELY_FIX.get(cause, 'see the message')}",
        ]
    return "\n".join(lines)
