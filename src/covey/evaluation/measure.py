"""Asking: every task n times, several tasks at once; each is handed over when all its answers are scored.

The random streams are those of an evaluation during training: named by seed, mode, task and attempt, never by what is
asked beside them. So what is asked after a restart is answered as it would have been."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from covey.evaluation.figures import Answer, Subject
from covey.rewards import Votes
from covey.rollout.collector import Collector, unscored_is_failed
from covey.types import Episode, Sampling, Task


@dataclass(frozen=True)
class Measure:
    """One model on one set of tasks in one mode."""

    subject: Subject
    tasks: Sequence[Task]
    sampling: Sampling
    votes: Votes | None
    together: int | None = None  # tasks asked at once; None: all

    async def run(self, collector: Collector, done: Collection[int], hand_over: Callable[[list[Answer]], None]) -> None:
        """Ask every task that is not `done`."""
        room = asyncio.Semaphore(self.together or max(1, len(self.tasks)))

        async def ask(index: int) -> None:
            async with room:
                hand_over(await self._ask(collector, index))

        jobs = [asyncio.ensure_future(ask(index)) for index in range(len(self.tasks)) if index not in done]
        try:
            await asyncio.gather(*jobs)
        finally:  # where one ends the evaluation, the others end with it
            for job in jobs:
                job.cancel()

    async def _ask(self, collector: Collector, index: int) -> list[Answer]:
        stream = ("eval", self.subject.mode)
        (group,) = await collector.groups([self.tasks[index]], self.subject.n, self.sampling, stream)
        names = collector.reward.names
        return [
            self._answer(index, attempt, unscored_is_failed(episode, names))
            for attempt, episode in enumerate(group.episodes)
        ]

    def _answer(self, index: int, attempt: int, episode: Episode) -> Answer:
        subject, failure = self.subject, episode.failure
        said = "" if failure is not None else episode.final_answer
        return Answer(
            model=subject.model,
            task=subject.task,
            mode=subject.mode,
            index=index,
            id=episode.task.id,
            attempt=attempt,
            rewards=dict(episode.rewards),
            answer=self.votes.final(said) if self.votes is not None else said,
            tokens=episode.response_tokens,
            stop=episode.stop,
            failure=failure.cause if failure is not None else None,
            message=failure.message if failure is not None else None,
        )
