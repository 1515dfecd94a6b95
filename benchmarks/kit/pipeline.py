"""Covey's side with its real components: tasks → collector and embedded engine → samples → algorithm → learner.

A step is `covey.training.step.step`, as in `covey train`.
"""

from __future__ import annotations

import asyncio
import gc
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.agents.resolve import resolve_agent
from covey.algorithms import make
from covey.config.schema import LearnerConfig
from covey.learner.learner import Learner
from covey.rewards import resolve_rewards
from covey.rollout.collector import Collector, TrainingSource
from covey.rollout.embedded import EmbeddedEngine
from covey.rollout.rendering import Renderer
from covey.training.step import Pipeline, Schedule, StepResult, step
from covey.types import Collected, Completion, Episode, Group, Sampling, StopReason, Task, Turn
from kit.measure import Stopwatch, now, reset_peak

NO_DEADLINE = 1e6  # seconds of an episode: slow episodes are measured, not cut off


def score(text: str) -> float:
    """A cheap reward that differs between the answers of a group."""
    return zlib.crc32(text.encode()) / 2**32


def checksum(final_answer: str) -> float:
    return score(final_answer)


@dataclass(frozen=True)
class Timed:
    """One training step."""

    sampling: float  # seconds until every answer was there and scored
    learning: float  # everything after that: samples, advantages, gradient, optimiser
    tokens: int  # sampled

    @property
    def total(self) -> float:
        return self.sampling + self.learning


class Trainer:
    """One model, its learner, and an engine for each set of prompts."""

    def __init__(self, model: Any, tokenizer: Any, *, eos_ids: Sequence[int], learner: LearnerConfig) -> None:
        """`eos_ids=()`: no token ends an answer, all have their full length."""
        self.model = model
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.learner = Learner(model, learner, total_updates=1000)
        self.algorithm = make("grpo")
        self.steps = 0

    def run(
        self, prompts: Sequence[str], group: int, max_tokens: int, *, warmup: int, steps: int
    ) -> list[tuple[Timed, StepResult]]:
        """Time each step on the same prompts after the warm-up; the peak memory is that of the timed steps."""
        gc.collect()  # engine and event loop are a reference cycle, which would keep the last cache
        return asyncio.run(self._run(prompts, group, max_tokens, warmup, steps))

    async def _run(
        self, prompts: Sequence[str], group: int, max_tokens: int, warmup: int, steps: int
    ) -> list[tuple[Timed, StepResult]]:
        tasks = [Task(str(n), ({"role": "user", "content": text},)) for n, text in enumerate(prompts)]
        engine = EmbeddedEngine(
            self.model, eos_ids=self.eos_ids, decode=self.tokenizer.decode, max_sequences=len(tasks) * group
        )
        rewards = resolve_rewards(checksum, None, {})
        source = TrainingSource(
            Collector(engine, Renderer(self.tokenizer), resolve_agent("chat"), rewards, 0, NO_DEADLINE),
            lambda _: tasks,
            attempts=group,
            sampling=Sampling(max_tokens=max_tokens),
            min_group_size=self.algorithm.needs.min_group_size,
        )
        schedule = Schedule(None, 1, rewards.weights, temperature=1.0, max_tokens=max_tokens)
        found = []
        try:
            for number in range(warmup + steps):
                if number == warmup:
                    reset_peak()
                watch = Stopwatch()
                pipeline = Pipeline(source, self.learner, self.algorithm, engine, schedule, watch)
                start = now()
                result = await step(pipeline, self.steps)
                total = now() - start
                self.steps += 1
                sampling = watch.seconds["rollout"]
                found.append((Timed(sampling, total - sampling, int(result.samples.mask_RT.sum())), result))
        finally:
            engine.close()
        return found[warmup:]


class Sampler:
    """The engine alone: samples all answers to a list of prompts concurrently, with log-probs and the given lengths."""

    def __init__(self, model: Any, max_sequences: int) -> None:
        self.loop = asyncio.Runner()
        self.engine = EmbeddedEngine(model, eos_ids=(), decode=str, max_sequences=max_sequences)

    def __call__(self, prompts: Sequence[Sequence[int]], tokens: int | Sequence[int]) -> int:
        """Sample the answers and return the number of tokens."""
        lengths = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
        done = self.loop.run(self._all(prompts, lengths))
        assert all(len(answer.logprobs) == length for answer, length in zip(done, lengths, strict=True))
        return sum(len(answer.token_ids) for answer in done)

    async def _all(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Completion]:
        asked = enumerate(zip(prompts, lengths, strict=True))
        return await asyncio.gather(
            *(self.engine.generate(ids, Sampling(max_tokens=length, seed=n)) for n, (ids, length) in asked)
        )

    def close(self) -> None:
        self.engine.close()
        self.loop.close()


def made_up(ids: Sequence[Sequence[int]], answers: Sequence[Sequence[Sequence[int]]]) -> Collected:
    """Groups with given answers, to measure the learner alone."""
    groups = []
    for number, (prompt, group) in enumerate(zip(ids, answers, strict=True)):
        task = Task(str(number), ())
        episodes = []
        for answer in group:
            count = len(answer)
            turn = Turn(tuple(prompt), tuple(answer), (-3.0,) * count, (0,) * count, StopReason.LENGTH)
            episodes.append(Episode(task, (turn,), (), {"checksum": score(str(answer))}, StopReason.LENGTH))
        groups.append(Group(task, tuple(episodes)))
    return Collected(tuple(groups))
