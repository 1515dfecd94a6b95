"""Evaluation on held-out tasks, with the same collector as training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from covey.config.schema import EvalConfig
from covey.errors import RunFailed
from covey.protocols import Metrics
from covey.rollout.collector import Collector, unscored_is_failed
from covey.types import Episode, Sampling, StopReason, Task


def eval_sampling(config: EvalConfig, mode: str, max_tokens: int, stop: tuple[str, ...]) -> Sampling:
    """Sampling settings of a mode: greedy, or sampled as configured."""
    if mode == "greedy":
        return Sampling(temperature=0.0, max_tokens=max_tokens, stop=stop)
    return Sampling(config.temperature, config.top_p, config.top_k, config.min_p, max_tokens, stop)


@dataclass(frozen=True)
class Evaluation:
    metrics: Metrics
    sample: Episode | None  # the first answer, for the console
    answers: Mapping[str, Sequence[Episode]]  # by mode


@dataclass(frozen=True)
class Evaluator:
    """Answers every task greedily, or sampled n times, and averages each reward. Random streams do not depend on the
    step, so two evaluations differ only in the policy."""

    collector: Collector
    tasks: Sequence[Task]
    config: EvalConfig
    max_tokens: int
    stop: tuple[str, ...]
    trained_reward: str
    warn: Callable[[str], None]

    async def run(self) -> Evaluation:
        metrics: Metrics = {}
        shown: Episode | None = None
        answers: dict[str, list[Episode]] = {}
        if (opponents := self.collector.opponents) is not None:
            await opponents.use_first()
        for mode in self.config.modes:
            episodes = answers[mode] = await self.answers(mode)
            done = [e for e in episodes if e.failure is None]
            failed = [e.failure for e in episodes if e.failure is not None]
            if not done:
                raise RunFailed(f"no evaluation task completed: {failed[0].cause}: {failed[0].message}")
            if failed:
                self.warn(
                    f"{len(failed)} of {len(episodes)} {mode} answers were not scored and do not count: "
                    f"{failed[0].cause}: {failed[0].message}"
                )
            metrics |= self._summary(mode, done, len(episodes))
            if shown is None:
                shown = done[0]
                metrics |= accuracy(done, self.trained_reward)
        return Evaluation(metrics, shown, answers)

    async def answers(self, mode: str) -> list[Episode]:
        attempts = self.config.n if mode == "sampled" else 1
        size = self.config.batch_size or len(self.tasks)
        sampling = eval_sampling(self.config, mode, self.max_tokens, self.stop)
        episodes: list[Episode] = []
        for start in range(0, len(self.tasks), size):
            tasks = self.tasks[start : start + size]
            groups = await self.collector.groups(tasks, attempts, sampling, ("eval", mode))
            for episode in (episode for group in groups for episode in group.episodes):
                if episode.cut_by == "rollout.max_tokens" and self.config.max_tokens is not None:
                    episode = replace(episode, cut_by="eval.max_tokens")  # the setting that applies here
                episodes.append(unscored_is_failed(episode, self.collector.reward.names))
        return episodes

    def _summary(self, mode: str, done: Sequence[Episode], total: int) -> Metrics:
        metrics: Metrics = {}
        for name in dict.fromkeys(name for episode in done for name in episode.rewards):
            scores = [score for episode in done if (score := episode.rewards.get(name)) is not None]
            if scores:
                metrics[f"eval/{mode}/{name}"] = sum(scores) / len(scores)
        metrics[f"eval/{mode}/length_mean"] = sum(e.response_tokens for e in done) / len(done)
        metrics[f"eval/{mode}/truncated"] = sum(e.stop is StopReason.LENGTH for e in done) / len(done)
        if total > len(done):
            metrics[f"eval/{mode}/failed"] = float(total - len(done))
        return metrics


def accuracy(episodes: Sequence[Episode], reward: str) -> Metrics:
    """`eval/accuracy`: the mean of the trained reward. If some roles are not trained, it is that of the others. Missing
    if the rewards of the roles always cancel, as in a zero-sum game whose roles are all trained."""
    outcomes = [(episode, own) for episode in episodes if (own := episode.outcomes(reward))]
    scores = [
        sum(own.values()) / len(own) if any(not t.trained for t in e.turns) else e.rewards[reward] or 0.0
        for e, own in outcomes
    ]
    cancel = not any(scores) and any(any(own.values()) for _, own in outcomes)
    return {} if cancel or not scores else {"eval/accuracy": sum(scores) / len(scores)}
