"""Turns tasks into scored groups: `Collector` runs an agent on all attempts concurrently and scores the episodes;
`TrainingSource` collects the groups of each training step.

A failure of the infrastructure is recorded on its episode and does not raise. A mistake of the model is a reply like
any other.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from covey.errors import EpisodeError, InputError, RunFailed, describe_error
from covey.images import ImageMistake, with_images
from covey.protocols import Agent, Curriculum, Reward, RolloutEngine
from covey.redact import hide
from covey.rollout.policy import EpisodePolicy
from covey.rollout.rendering import Renderer
from covey.rollout.roles import names_roles, split_roles
from covey.types import Collected, Episode, Failure, Group, Prompt, RewardTable, Sampling, StopReason, Task

if TYPE_CHECKING:
    from pathlib import Path

    from covey.rollout.opponents import Opponents

TaskBatch = Callable[[int], Sequence[Task]]
FreshTasks = Callable[[int, int, int, Collection[str]], Sequence[Task]]  # step, round, count, ids tried already


@dataclass
class Collector:
    """Runs agents on an engine. `seed` names the run's random streams."""

    engine: RolloutEngine
    renderer: Renderer
    agent: Agent
    reward: Reward
    seed: int
    max_seconds: float
    max_response_tokens: int | None = None
    keep_images: int | None = None
    opponents: Opponents | None = None  # past policies that play some roles
    on_episode: Callable[[], None] = lambda: None  # called when an episode has ended, before it is scored

    async def groups(
        self,
        tasks: Sequence[Task],
        attempts: int,
        sampling: Sampling,
        stream: tuple[object, ...],
        *,
        greedy_baseline: bool = False,
    ) -> list[Group]:
        """Attempt every task `attempts` times and score the episodes, in task order. `greedy_baseline`: one more,
        greedy attempt."""
        groupwise = self.reward.groupwise
        first_prompts: dict[str, Prompt] = {}
        jobs = [
            self._attempt(task, sampling, (self.seed, *stream, task.id, attempt), first_prompts, score=not groupwise)
            for task in tasks
            for attempt in range(attempts)
        ]
        if greedy_baseline:
            greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
            jobs += [
                self._attempt(task, greedy, (self.seed, *stream, task.id, "greedy"), first_prompts, score=True)
                for task in tasks
            ]
        episodes = await asyncio.gather(*jobs)
        count = len(tasks) * attempts
        groups = [episodes[i : i + attempts] for i in range(0, count, attempts)]
        if groupwise:
            groups = await asyncio.gather(*map(self._score_group, tasks, groups))
        baselines: list[Episode | None] = [*episodes[count:]] or [None] * len(tasks)
        return [Group(task, tuple(group), one) for task, group, one in zip(tasks, groups, baselines, strict=True)]

    async def answer(self, task: Task, sampling: Sampling) -> Episode:
        """One attempt, not scored."""
        return await self._attempt(task, sampling, (self.seed, "ask", task.id), {}, score=False)

    async def _attempt(
        self,
        task: Task,
        sampling: Sampling,
        stream: tuple[object, ...],
        first_prompts: dict[str, Prompt],
        *,
        score: bool,
    ) -> Episode:
        """One episode and its reward, within agent.max_seconds, not counting the time that the engine takes."""
        deadline = asyncio.timeout(self.max_seconds)
        policy = EpisodePolicy(
            self.engine,
            self.renderer,
            sampling,
            stream,
            deadline=deadline,
            first_prompts=first_prompts,
            max_response_tokens=self.max_response_tokens,
            keep_images=self.keep_images,
            opponents=self.opponents,
        )
        started, cause = time.monotonic(), "agent"
        try:
            async with deadline:
                try:
                    episode = await self.agent.run(policy, task)
                finally:
                    self.on_episode()
                if not episode.turns:
                    raise NoReply("no reply could be sampled: the first prompt leaves no room for one")
                messages = with_images(episode.messages)  # an agent may return images of PIL
                episode = replace(episode, messages=messages, cut_by=_cut_by(episode, policy))
                cause = "reward"
                rewards = await self.reward(task, episode) if score else episode.rewards
                return replace(episode, rewards=rewards, seconds=time.monotonic() - started)
        except TimeoutError as error:
            message = f"{type(error).__name__}: {error}"
            if deadline.expired():  # otherwise the agent raised it
                cause, message = "timeout", f"the episode took longer than agent.max_seconds={self.max_seconds:g}"
        except ImageMistake as error:  # of an environment, a tool or a program: only this episode fails
            cause, message = "image", str(error)
        except (InputError, RunFailed):
            raise  # a user's mistake or a dead engine ends the run
        except EpisodeError as error:
            cause, message = error.cause, str(error)
        except (Exception, SystemExit) as error:
            message = describe_error(error)
        seconds = time.monotonic() - started
        return Episode(task, tuple(policy.turns), task.messages, failure=Failure(cause, hide(message)), seconds=seconds)

    async def _score_group(self, task: Task, episodes: Sequence[Episode]) -> list[Episode]:
        """Rewards that compare attempts need all of them. If such a reward raises, the whole group fails."""
        try:
            async with asyncio.timeout(self.max_seconds):
                tables = await self.reward.group(task, episodes)
        except ImageMistake as error:
            failure = Failure("image", hide(str(error)))
        except (InputError, RunFailed):
            raise
        except TimeoutError:
            failure = Failure("timeout", f"scoring a group took longer than agent.max_seconds={self.max_seconds:g}")
        except EpisodeError as error:
            failure = Failure(error.cause, hide(str(error)))
        except (Exception, SystemExit) as error:
            failure = Failure("reward", hide(describe_error(error)))
        else:
            return [_with_rewards(e, table) for e, table in zip(episodes, tables, strict=True)]
        return [e if e.failure else replace(e, failure=failure) for e in episodes]


@dataclass(frozen=True)
class Refill:
    """Dynamic sampling: zero-variance groups are replaced by new ones, in at most `rounds` rounds. A group has a
    learning signal if its total rewards differ, among each other or from the greedy attempt's; with `per_reward`, if
    any single reward differs."""

    weights: Mapping[str, float]  # of the rewards in the total
    per_reward: bool
    rounds: int
    fresh: FreshTasks

    def has_signal(self, group: Group) -> bool:
        if names_roles([group], self.weights):  # their sum may be constant, as in a game of two players
            return any(self._has_signal(own) for own in split_roles([group], self.weights)[0])
        return self._has_signal(group)

    def _has_signal(self, group: Group) -> bool:
        episodes = _all_episodes(group)
        if self.per_reward:
            columns = [{e.rewards.get(name) for e in episodes} - {None} for name in self.weights]
            return any(len(column) > 1 for column in columns)
        return len({sum(w * (e.rewards.get(name) or 0.0) for name, w in self.weights.items()) for e in episodes}) > 1


class TrainingSource:
    """The groups of each training step, sampled synchronously: staleness 0."""

    def __init__(
        self,
        collector: Collector,
        batch: TaskBatch,
        *,
        attempts: int,
        sampling: Sampling,
        min_group_size: int,
        greedy_baseline: bool = False,
        refill: Refill | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        self.collector = collector
        self.batch = batch
        self.attempts = attempts
        self.sampling = sampling
        self.min_group_size = min_group_size
        self.greedy_baseline = greedy_baseline
        self.refill = refill
        self.curriculum = curriculum
        self.step = 0
        self.taken: tuple[Task, ...] = ()  # tasks of the groups that `next` returned last

    async def next(self) -> Collected:
        """Groups with a learning signal. Failed episodes are removed from their group, and groups that become too small
        are dropped. With `refill`, zero-variance groups are set aside and replaced."""
        tasks, opponents = self.batch(self.step), self.collector.opponents
        opponent = {} if opponents is None else await opponents.use(self.step)
        raw = await self._collect(tasks, ("train", self.step))
        target, rounds = len(tasks), 0
        while self.refill is not None and rounds < self.refill.rounds:
            missing = target - len(self._sort(raw)[0])
            fresh = self.refill.fresh(self.step, rounds, missing, {g.task.id for g in raw}) if missing > 0 else ()
            if not fresh:
                break
            rounds += 1
            raw += await self._collect(fresh, ("train", self.step, "refill", rounds))
        return replace(self._collected(raw, target, rounds), opponent=opponent)

    def _collected(self, raw: Sequence[Group], target: int, refills: int, reused: Sequence[Group] = ()) -> Collected:
        """Sort the sampled groups, and count failures and cut-off episodes. `reused`: groups of earlier steps, which
        were sorted and counted there."""
        fresh, zero_variance = self._sort(raw)
        dropped, with_signal = len(raw) - len(fresh) - len(zero_variance), [*fresh, *reused]
        failed = [e.failure for g in raw for e in _all_episodes(g) if e.failure]
        failures = Counter(failure.cause for failure in failed)
        examples = {failure.cause: failure.message for failure in reversed(failed)}  # the first of each
        cut = Counter(e.cut_by for g in raw for e in _all_episodes(g) if e.cut_by is not None)
        if not with_signal and not zero_variance:
            raise NothingCompleted(_diagnosis(raw, failures, examples))
        if not with_signal:  # a step without signal is better than no step
            with_signal, zero_variance = zero_variance[:target], zero_variance[target:]
        self.taken = tuple(group.task for group in with_signal)
        return Collected(
            tuple(with_signal),
            tuple(zero_variance),
            refills,
            dict(failures),
            examples,
            dropped,
            attempts=sum(len(_all_episodes(group)) for group in raw),
            reused=len(reused),
            cut=dict(cut),
            curriculum=self.curriculum.observe(self.step, raw) if self.curriculum else {},
        )

    async def _collect(self, tasks: Sequence[Task], stream: tuple[object, ...]) -> list[Group]:
        raw = await self.collector.groups(
            tasks, self.attempts, self.sampling, stream, greedy_baseline=self.greedy_baseline
        )
        names = self.collector.reward.trained
        return [
            replace(
                g,
                episodes=tuple(unscored_is_failed(episode, names) for episode in g.episodes),
                baseline=None if g.baseline is None else unscored_is_failed(g.baseline, names),
            )
            for g in raw
        ]

    def _sort(self, raw: Sequence[Group]) -> tuple[list[Group], list[Group]]:
        """Groups with a signal and zero-variance groups, both without failed episodes."""
        complete = [g for g in raw if g.baseline is None or g.baseline.failure is None]
        kept = [replace(g, episodes=tuple(e for e in g.episodes if not e.failure)) for g in complete]
        kept = [g for g in kept if len(g.episodes) >= self.min_group_size]
        if self.refill is None:
            return kept, []
        return [g for g in kept if self.refill.has_signal(g)], [g for g in kept if not self.refill.has_signal(g)]

    def policy_updated(self, version: int) -> None:
        self.step = version
        if self.collector.opponents is not None:
            self.collector.opponents.policy_updated(version)

    def close(self) -> None:
        if self.collector.opponents is not None:
            self.collector.opponents.close()

    def save(self, checkpoint: Path) -> None:
        """Add files to the folder of a checkpoint: those of past policies."""
        if self.collector.opponents is not None:
            self.collector.opponents.save(checkpoint)

    def state(self) -> dict[str, Any]:
        """The state to checkpoint: only a curriculum keeps something from one step to the next."""
        return {"curriculum": self.curriculum.state(())} if self.curriculum else {}

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Continue from a checkpoint's `state`, at that step."""
        self.step = step
        if self.curriculum and "curriculum" in state:  # otherwise the tasks were drawn uniformly
            self.curriculum.restore(state["curriculum"])


def _with_rewards(episode: Episode, table: RewardTable | EpisodeError) -> Episode:
    if episode.failure is not None:
        return episode
    if isinstance(table, EpisodeError):
        return replace(episode, failure=Failure(table.cause, hide(str(table))))
    return replace(episode, rewards=table)


def _all_episodes(group: Group) -> tuple[Episode, ...]:
    return group.episodes if group.baseline is None else (*group.episodes, group.baseline)


def unscored_is_failed(episode: Episode, names: Collection[str]) -> Episode:
    """An episode without any score counts as failed, not as 0. `names`: the rewards that count; a table may have other
    entries, such as measurements."""
    if episode.failure is not None or any(episode.rewards.get(name) is not None for name in names):
        return episode
    if episode.cut_by is not None:
        return replace(
            episode, failure=Failure("truncated", f"cut off by {limit_name(episode.cut_by)}, and not scored")
        )
    return replace(episode, failure=Failure("unscored", "every reward that counts returned None"))


def limit_name(cut_by: str) -> str:
    return "the max_tokens of the agent's own request" if cut_by == "request" else cut_by


def _cut_by(episode: Episode, policy: EpisodePolicy) -> str | None:
    match episode.stop:
        case StopReason.LENGTH:
            return policy.cut_by or "rollout.max_tokens"  # unknown if the agent samples by itself
        case StopReason.TURNS:
            return "agent.max_turns"
    return None


class NoReply(EpisodeError):
    """An episode without any reply."""

    cause = "no_room"


class NothingCompleted(RunFailed):
    """All groups of a step failed."""


_LIKELY_FIX = {
    "timeout": "raise agent.max_seconds, or lower rollout.max_tokens",
    "reward": "run the reward on one episode by hand; it raised on every one",
    "reward_timeout": "raise reward.seconds, or make the reward faster",
    "reward_crash": "run the reward on one episode by hand; its process died on every one",
    "judge": "check that the judge's endpoint responds: reward.options.judge.url",
    "tool_timeout": "raise agent.tool_seconds, or the tool's own timeout",
    "tool_crash": "call the tool once by hand; its process died in every episode",
    "search": "check that the search server responds, and its key",
    "sandbox": "see covey doctor: no sandbox could be started",
    "mcp": "check that the tool server responds",
    "image": "look at the images that tools and environments return; those of data files: covey data check FILE",
    "environment": "run the environment once by hand; it raised in every episode",
    "environment_timeout": "raise agent.tool_seconds: reset or step took longer in every episode",
    "browser": "see the message; try the page with covey sample agent=gui, or lower agent.pages_per_browser",
    "browser_timeout": "raise agent.tool_seconds, or lower agent.pages_per_browser: pages answer too slowly",
    "page": "open the task's url by hand; no page could be opened",
    "success": "run the tasks' success on their pages by hand; it failed in every episode",
    "no_room": "shorten the prompts, or raise model.context_length or agent.max_response_tokens",
    "nonfinite": "try model.dtype=float32 or bfloat16; if the weights are broken, go back to an earlier checkpoint",
    "truncated": "raise that limit, or give the environment a method end(reason) that scores unfinished episodes",
    "unscored": "return a number from the reward; None means that an attempt cannot be scored",
    "abandoned": "start the program that plays the attempts: it fetches them with POST /episodes (docs/gateway.md)",
    "program": "run agent.command by hand against covey serve; its last output is above",
    "agent": "the agent raised on every attempt; try it on one task with covey sample",
}


def _diagnosis(raw: Sequence[Group], failures: Counter[str], examples: dict[str, str]) -> str:
    lines = [f"No training tasks completed: all {len(raw)} groups of {len(raw[0].episodes)} attempts failed"]
    for cause, count in failures.most_common():
        lines += [
            f"  {count} × {cause}: {_limits(raw) if cause == 'truncated' else examples[cause]}",
            f"      likely fix: {_LIKELY_FIX.get(cause, 'see the message')}",
        ]
    return "\n".join(lines)


def _limits(raw: Sequence[Group]) -> str:
    """The limits that cut episodes off before they were scored, the most frequent first."""
    failed = [e for g in raw for e in _all_episodes(g) if e.failure is not None and e.failure.cause == "truncated"]
    limits = Counter(limit_name(e.cut_by or "") for e in failed).most_common()
    named = [limit if len(limits) == 1 else f"{limit} ({count})" for limit, count in limits]
    return f"cut off by {', '.join(named)}, and not scored"
