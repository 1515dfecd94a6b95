"""One training step, for every mode and machine: from tasks to new weights."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol

import torch

from covey.learner.learner import extreme
from covey.protocols import Advantages, Algorithm, GroupSource, Learner, Metrics, RolloutEngine, TokenTrace
from covey.training.samples import minibatches, to_samples
from covey.types import Collected, Samples


@dataclass(frozen=True)
class Schedule:
    """How the samples of a step are cut into optimiser steps."""

    groups_per_batch: int | None
    epochs: int
    weights: dict[str, float]  # of the named rewards
    temperature: float
    max_tokens: int


@dataclass(frozen=True)
class StepResult:
    collected: Collected
    samples: Samples
    advantages: Advantages
    metrics: Metrics
    trace: TokenTrace  # [R, T], of the first epoch


class Stages(Protocol):
    def stage(self, name: str) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Pipeline:
    """The parts that a step calls."""

    source: GroupSource
    learner: Learner
    algorithm: Algorithm
    engine: RolloutEngine
    schedule: Schedule
    stages: Stages
    thread: Executor | None = None  # where the learner learns while episodes go on: tools answer, programs play
    publish_every: int = 1  # an engine with its own weights keeps sampling with the old ones in between


async def step(pipeline: Pipeline, index: int) -> StepResult:
    return await update(pipeline, await sample(pipeline), index)


async def sample(pipeline: Pipeline) -> Collected:
    """Tasks → scored groups. If this is cancelled, nothing is lost: the next call samples the same step."""
    with pipeline.stages.stage("rollout"):
        return await pipeline.source.next()


async def update(pipeline: Pipeline, collected: Collected, index: int) -> StepResult:
    """Scored groups → new weights, published to the engine."""
    with pipeline.stages.stage("rollout"):
        await pipeline.engine.pause()
    if pipeline.thread is not None:
        result = await asyncio.get_running_loop().run_in_executor(pipeline.thread, learn, pipeline, collected)
    else:
        result = learn(pipeline, collected)
    await publish(
        pipeline, index + 1, now=not pipeline.engine.owns_weights or (index + 1) % pipeline.publish_every == 0
    )
    if pipeline.thread is not None:
        result = replace(result, metrics=result.metrics | ages(result.samples, index))
    return result


def learn(pipeline: Pipeline, collected: Collected) -> StepResult:
    """From scored groups to new weights."""
    pipeline.learner.reload()
    plan = pipeline.schedule
    samples = to_samples(collected, plan.weights, temperature=plan.temperature, max_tokens=plan.max_tokens)
    with pipeline.stages.stage("annotate"):
        samples = pipeline.learner.annotate(
            samples, pipeline.algorithm.needs
        )  # reference log-probs and values, if needed
    samples, shaped = pipeline.algorithm.shape(samples)
    advantages = pipeline.algorithm.advantages(samples)
    updates: list[Metrics] = []
    trace = empty_trace(samples)
    with pipeline.stages.stage("update"):
        for batch in minibatches(samples, advantages, groups_per_batch=plan.groups_per_batch, epochs=plan.epochs):
            metrics, seen = pipeline.learner.update(batch, pipeline.algorithm)
            updates.append(metrics)
            if batch.epoch == 0:
                write_trace(trace, batch.row_R, seen)
    metrics = {**shaped, **advantages.metrics, **merge(updates)}
    if pipeline.engine.owns_weights:
        metrics |= mismatch(samples, trace, plan.groups_per_batch)
    return StepResult(collected, samples, advantages, metrics, trace)


async def publish(pipeline: Pipeline, version: int, *, now: bool = True) -> None:
    """The learner's weights to the engine, unless it is not yet time for that; it may sample from here on."""
    with pipeline.stages.stage("publish"):
        if now:
            await pipeline.engine.publish(pipeline.learner.weights(), version=version)
        pipeline.learner.offload()
        await pipeline.engine.resume()
    pipeline.source.policy_updated(version)


def ages(samples: Samples, version: int) -> Metrics:
    """How many updates old the policy was that drew a token."""
    found = [version - v for row in samples.rows for v, sampled in zip(row.versions, row.mask, strict=True) if sampled]
    return {"policy/age": sum(found) / max(1, len(found)), "policy/age_max": float(max(found, default=0))}


def mismatch(samples: Samples, trace: TokenTrace, groups_per_batch: int | None) -> Metrics:
    """How far the engine's log-probs of the sampled tokens are from the learner's, of the same weights. Where the
    learner did not compute its own before the first update, that update did, for its mini-batch."""
    mask_RT = samples.mask_RT
    if samples.sampling_logprobs_RT is not None:
        log_ratio_RT = samples.old_logprobs_RT - samples.sampling_logprobs_RT
    else:
        first_R = samples.group_N[samples.episode_R] < (groups_per_batch or samples.groups)
        mask_RT = mask_RT & first_R[:, None]
        log_ratio_RT = trace.ratio.where(mask_RT, 1.0).log()
    found = log_ratio_RT[mask_RT].double()
    if not len(found):  # every answer is masked
        return {}
    return {
        "rollout/mismatch": float(found.abs().mean()),
        "rollout/kl": float((found.exp() - 1 - found).mean()),
    }


def empty_trace(samples: Samples) -> TokenTrace:
    return TokenTrace(*(torch.zeros(samples.mask_RT.shape) for _ in range(3)))


def write_trace(trace: TokenTrace, row_R: torch.Tensor, seen: TokenTrace) -> None:
    for whole, part in ((trace.advantage, seen.advantage), (trace.ratio, seen.ratio), (trace.entropy, seen.entropy)):
        whole[row_R] = part


def merge(updates: Sequence[Metrics]) -> Metrics:
    """The metrics of a step's optimiser updates: the largest of maxima, the smallest of minima, the mean of the rest.
    Updates may report different metrics: a skipped one has no gradient norm and no learning rate of the critic. Each
    metric is taken over the updates in which it is finite. Counters keep their last value."""
    found: Metrics = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [value for update in updates if math.isfinite(value := update.get(name, math.nan))]
        pick = extreme(name)
        found[name] = math.nan if not values else reduce(pick, values) if pick else sum(values) / len(values)
    return found | {"optim/skipped": updates[-1]["optim/skipped"], "optim/updates": float(len(updates))}
