"""One training step: from tasks to new weights, for every mode and machine.

tasks → rollout → rewards → annotate → shape → advantages → update → publish
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from covey.protocols import Advantages, Algorithm, GroupSource, Learner, Metrics, RolloutEngine, TokenTrace
from covey.training.metrics import engine_mismatch, merge_updates, policy_age
from covey.training.samples import minibatches, to_samples
from covey.types import Collected, Samples

if TYPE_CHECKING:
    from covey.training.teacher import TeacherInputs


@dataclass(frozen=True)
class Schedule:
    """How the samples of a step are divided into optimiser steps."""

    groups_per_batch: int | None  # None: one mini-batch
    epochs: int
    weights: dict[str, float]  # of the named rewards
    temperature: float
    max_tokens: int


class Stages(Protocol):
    """Times the stages of a step."""

    def stage(self, name: str) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Pipeline:
    """The components of a training step."""

    source: GroupSource
    learner: Learner
    algorithm: Algorithm
    engine: RolloutEngine
    schedule: Schedule
    stages: Stages
    thread: Executor | None = None  # runs the learner while episodes continue (mode=async)
    publish_every: int = 1  # steps between weight updates of an engine that owns its weights
    teacher: TeacherInputs | None = None  # its own prompts, or its endpoint


@dataclass(frozen=True)
class StepResult:
    collected: Collected
    samples: Samples
    advantages: Advantages
    metrics: Metrics
    trace: TokenTrace  # [R, T], of the first epoch


async def step(pipeline: Pipeline, index: int) -> StepResult:
    return await update(pipeline, await sample(pipeline), index)


async def sample(pipeline: Pipeline) -> Collected:
    """Sample and score the groups of a step. If cancelled, the next call samples the same step again."""
    with pipeline.stages.stage("rollout"):
        return await pipeline.source.next()


async def update(pipeline: Pipeline, collected: Collected, index: int) -> StepResult:
    """Train on scored groups, then publish the new weights to the engine."""
    with pipeline.stages.stage("rollout"):
        await pipeline.engine.pause()
    if pipeline.thread is None:
        result = learn(pipeline, collected)
    else:
        result = await asyncio.get_running_loop().run_in_executor(pipeline.thread, learn, pipeline, collected)
        result = replace(result, metrics=result.metrics | policy_age(result.samples, index))
    due = not pipeline.engine.owns_weights or (index + 1) % pipeline.publish_every == 0
    await publish(pipeline, index + 1, now=due)
    return result


def learn(pipeline: Pipeline, collected: Collected) -> StepResult:
    """Compute advantages and update the policy, one optimiser step per mini-batch."""
    learner, algorithm, schedule = pipeline.learner, pipeline.algorithm, pipeline.schedule
    learner.reload()
    samples = to_samples(
        collected,
        schedule.weights,
        turns=algorithm.needs.turns,
        temperature=schedule.temperature,
        max_tokens=schedule.max_tokens,
    )
    with pipeline.stages.stage("annotate"):
        if pipeline.teacher is not None:
            samples = pipeline.teacher.add_to(samples, collected)
        samples = learner.annotate(samples, algorithm.needs)  # reference log-probs and values, if needed
    samples, shaping_metrics = algorithm.shape(samples)
    advantages = algorithm.advantages(samples)
    updates: list[Metrics] = []
    trace = empty_trace(samples)
    batches = minibatches(samples, advantages, groups_per_batch=schedule.groups_per_batch, epochs=schedule.epochs)
    with pipeline.stages.stage("update"):
        for batch in batches:
            metrics, batch_trace = learner.update(batch, algorithm)
            updates.append(metrics)
            if batch.epoch == 0:
                write_rows(trace, batch.row_R, batch_trace)
    metrics = {**shaping_metrics, **advantages.metrics, **merge_updates(updates)}
    if pipeline.engine.owns_weights:
        metrics |= engine_mismatch(samples, trace, schedule.groups_per_batch)
    return StepResult(collected, samples, advantages, metrics, trace)


async def publish(pipeline: Pipeline, version: int, *, now: bool = True) -> None:
    """Send the learner's weights to the engine if due `now`, and let it sample again."""
    with pipeline.stages.stage("publish"):
        if now:
            await pipeline.engine.publish(pipeline.learner.weights(), version=version)
        if pipeline.engine.owns_weights:  # otherwise it samples with the learner's
            pipeline.learner.offload()
        await pipeline.engine.resume()
    pipeline.source.policy_updated(version)


def empty_trace(samples: Samples) -> TokenTrace:
    return TokenTrace(*(torch.zeros(samples.mask_RT.shape) for _ in range(3)))


def write_rows(trace: TokenTrace, row_R: torch.Tensor, part: TokenTrace) -> None:
    trace.advantage[row_R] = part.advantage
    trace.ratio[row_R] = part.ratio
    trace.entropy[row_R] = part.entropy
