"""Covey's side, built by the functions that `covey train` uses: the model from its folder, learner and engine by
`covey.app.models`. A step is `covey.training.step.step`: tasks → collector → samples → algorithm → learner.
"""

from __future__ import annotations

import asyncio
import gc
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from covey.agents.resolve import resolve_agent
from covey.algorithms import make
from covey.app.models import make_engine, make_learner
from covey.config.schema import AgentConfig, Config, DataConfig, ModelConfig, RolloutConfig
from covey.models.folder import read_config
from covey.models.loading import ModelSource, load_policy, open_source
from covey.protocols import Algorithm
from covey.rewards import resolve_rewards
from covey.rollout.collector import Collector, TrainingSource
from covey.rollout.rendering import Renderer
from covey.training.interrupts import freeze_garbage
from covey.training.step import Pipeline, Schedule, StepResult, step
from covey.types import Collected, Completion, Episode, Group, Messages, Sampling, StopReason, Task, Turn
from kit.agents import AgentTurn, play_agents
from kit.measure import Stopwatch, now, reset_peak
from kit.models import SHAPES, model_folder, word_tokenizer

GROUP = 8  # episodes of a task
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


@dataclass(frozen=True)
class Spec:
    """What models, learner and engine are built from: a `covey.app.models.BuildSpec`."""

    config: Config
    model: ModelSource
    algorithm: Algorithm
    total_steps: int = 1000
    task_count: int = 1_000_000  # enough for every step

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, max_sequences: int = 256, **sections: Any) -> Spec:
        """Of a model by name, with its device and precision; `sections` are further parts of the configuration. Weights
        of a shape are written to a folder, with `changes` of its configuration, and loaded like any others."""
        name, device, dtype = settings["model"], settings["device"], settings["dtype"]
        folder = model_folder(name, device, dtype, **settings.get("changes", {})) if name in SHAPES else name
        model = replace(sections.pop("model", ModelConfig()), name=folder, device=device, dtype=dtype)
        if name in SHAPES:
            found = read_config(folder, folder, revision=None, trusted=False)
            source = ModelSource(folder, folder, word_tokenizer(found.vocab_size), found)
        else:
            source = open_source(model)
        rollout = RolloutConfig(max_sequences=max_sequences, group_size=GROUP)
        config = Config(model=model, rollout=rollout, **sections)
        return cls(config, source, make("grpo"))


class Endless(ModelSource):
    """A model whose answers no token ends."""

    def eos_ids(self) -> tuple[int, ...]:
        return ()


def endless(spec: Spec) -> Spec:
    source = {f.name: getattr(spec.model, f.name) for f in fields(spec.model)}
    return replace(spec, model=Endless(**source))


class Trainer:
    """One learner, and an engine for each set of prompts."""

    def __init__(self, spec: Spec, *, fixed: bool = True) -> None:
        """`fixed`: no token ends an answer, all have their full length."""
        self.spec = spec
        self.fixed = fixed
        self.learner = make_learner(spec, None)
        self.steps = 0

    def run(
        self, prompts: Sequence[str | Messages], group: int, max_tokens: int, *, warmup: int, steps: int
    ) -> list[tuple[Timed, StepResult]]:
        """Time each step on the same prompts, texts or messages, after the warm-up; the peak memory is that of the
        timed steps."""
        gc.collect()  # engine and event loop are a reference cycle, which would keep the last cache
        return asyncio.run(self._run(prompts, group, max_tokens, warmup, steps))

    async def _run(
        self, prompts: Sequence[str | Messages], group: int, max_tokens: int, warmup: int, steps: int
    ) -> list[tuple[Timed, StepResult]]:
        tasks = [Task(str(n), _messages(prompt)) for n, prompt in enumerate(prompts)]
        spec = self.spec
        renderer = Renderer(spec.model.tokenizer, vision=spec.model.vision)
        sampled = endless(spec) if self.fixed else spec
        engine: Any = make_engine(_with_rows(sampled, len(tasks) * group), self.learner.model)
        rewards = resolve_rewards(checksum, None, {})
        source = TrainingSource(
            Collector(engine, renderer, resolve_agent("chat"), rewards, 0, NO_DEADLINE),
            lambda _: tasks,
            attempts=group,
            sampling=Sampling(max_tokens=max_tokens),
            min_group_size=spec.algorithm.needs.min_group_size,
        )
        schedule = Schedule(None, 1, rewards.weights, temperature=1.0, max_tokens=max_tokens)
        found = []
        try:
            for number in range(warmup + steps):
                if number == warmup:
                    reset_peak()
                watch = Stopwatch()
                pipeline = Pipeline(source, self.learner, spec.algorithm, engine, schedule, watch)
                start = now()
                result = await step(pipeline, self.steps)
                total = now() - start
                self.steps += 1
                sampling = watch.seconds["rollout"]
                found.append((Timed(sampling, total - sampling, int(result.samples.mask_RT.sum())), result))
        finally:
            engine.close()
        return found[warmup:]


def _messages(prompt: str | Messages) -> Messages:
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)


def _with_rows(spec: Spec, rows: int) -> Spec:
    return replace(spec, config=replace(spec.config, rollout=replace(spec.config.rollout, max_sequences=rows)))


def _sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of agents: an agent with tools, and how many episodes a step has."""
    if "agents" not in settings:
        return {}
    return {"agent": AgentConfig(name="hf"), "data": DataConfig(train_batch_size=max(1, settings["agents"] // GROUP))}


class Sampler:
    """The engine alone: samples all answers to a list of prompts concurrently, with log-probs and the given lengths."""

    def __init__(self, settings: Mapping[str, Any], max_sequences: int) -> None:
        self.loop = asyncio.Runner()
        spec = endless(Spec.of(settings, max_sequences=max_sequences, **_sections(settings)))
        self.engine: Any = make_engine(spec, load_policy(spec.model, spec.config.model))

    def __call__(self, prompts: Sequence[Sequence[int]], tokens: int | Sequence[int]) -> int:
        """Sample the answers and return the number of tokens."""
        lengths = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
        with freeze_garbage():  # as a run does
            done = self.loop.run(self._all(prompts, lengths))
        assert all(len(answer.logprobs) == length for answer, length in zip(done, lengths, strict=True))
        return sum(len(answer.token_ids) for answer in done)

    async def _all(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Completion]:
        asked = enumerate(zip(prompts, lengths, strict=True))
        return await asyncio.gather(
            *(self.engine.generate(ids, Sampling(max_tokens=length, seed=n)) for n, (ids, length) in asked)
        )

    def agents(self, work: Sequence[Sequence[AgentTurn]]) -> int:
        """Agents of several turns, all at once. Returns the number of sampled tokens."""

        async def generate(ids: Sequence[int], tokens: int, seed: int) -> Sequence[int]:
            done = await self.engine.generate(ids, Sampling(max_tokens=tokens, seed=seed))
            assert len(done.logprobs) == len(done.token_ids)
            return done.token_ids

        with freeze_garbage():  # as a run does
            return self.loop.run(play_agents(generate, work))

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
