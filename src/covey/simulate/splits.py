"""Several ways to split devices between learner and engines, and what each would give.

learning      tokens of the fullest rank · seconds of a token + updates · seconds of an update + messages
messages      ddp: 2 (r − 1)/r · gradients, every update;  fsdp: (r − 1)/r · (2 · weights + gradients), every
              micro-batch; over the slowest link among r ranks, none of it hidden behind computing
publishing    the weights once over the slowest link, and once more where they are shared out
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from covey.simulate.events import Place, Step, Work, simulate
from covey.simulate.figures import Speeds
from covey.simulate.hardware import NODE, Device
from covey.simulate.memory import (
    USABLE,
    Memory,
    Training,
    activation_bytes,
    engine_memory,
    learner_memory,
    most_sequences,
    states,
)
from covey.simulate.shape import Shape

STEPS = 6  # that are averaged, after the first ones


@dataclass(frozen=True)
class Split:
    learners: int  # devices
    rollout: int  # devices; those of the learner where shared
    shared: bool

    @property
    def name(self) -> str:
        return f"{self.learners} shared" if self.shared else f"{self.learners} + {self.rollout}"


@dataclass(frozen=True)
class Job:
    """What is to be run, and on what."""

    work: Work
    speeds: Speeds  # of one device; decoding of one engine
    shape: Shape
    device: Device
    training: Training
    updates: int = 1  # of the optimiser, in a step
    epochs: int = 1
    parallel: str = "auto"  # auto | ddp | fsdp
    engine_devices: int = 1  # that share one copy of the model
    max_sequences: int = 256
    cache_share: float = 0.5  # of the memory left, where learner and engine share devices
    drain: bool = False

    @property
    def context(self) -> float:
        """Tokens of a whole row, in the mean."""
        return self.work.episodes.prompt + self.work.episodes.length

    @property
    def step_tokens(self) -> float:
        work = self.work
        return work.groups * (work.episodes.prompt + work.attempts * work.episodes.length)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        rows = (sum(turn.tokens + turn.given for turn in turns) for turns in self.work.episodes.seen)
        return self.work.episodes.prompt + max(rows)


@dataclass(frozen=True)
class Prediction:
    split: Split
    lead: int  # 0: by turns
    parallel: str
    learner: Memory  # of one device; both where shared
    engine: Memory
    fits: bool
    learning: float = math.nan  # seconds of a mean step, messages included
    messages: float = math.nan  # seconds of it
    publishing: float = math.nan  # seconds
    step: float = math.nan  # seconds
    tokens_per_second: float = math.nan
    learner_busy: float = math.nan  # share of the time
    engines_busy: float = math.nan
    age: float = math.nan
    age_max: int = 0

    @property
    def mode(self) -> str:
        return f"async, staleness {self.lead}" if self.lead else "sync"


def all_splits(devices: int, engine_devices: int = 1) -> list[Split]:
    """Shared, and a few shares of the devices; whole machines where there are several."""
    grain = NODE if devices >= 2 * NODE else 1
    grain = math.lcm(grain, engine_devices)
    shares = {round(devices * share / grain) * grain for share in (1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8)}
    apart = [Split(devices - rollout, rollout, False) for rollout in sorted(shares) if 0 < rollout < devices]
    shared = [Split(devices, devices, True)] if devices % engine_devices == 0 else []
    return shared + apart


def predict(job: Job, split: Split, lead: int) -> Prediction:
    parallel = _parallel(job, split)
    shards = split.learners if parallel == "fsdp" else 1
    learner, engine, capacity, micro = _memory(job, split, shards, lead)
    empty = Prediction(split, lead, parallel, learner, engine, fits=False)
    if micro < job.longest or capacity < 1 or max(learner.total, engine.total) > _room(job):
        return empty

    def learn(tokens: float, longest: float) -> float:
        return _computing(job, split.learners, shards, tokens, longest) + _messages(
            job, split.learners, parallel, tokens, micro
        )

    place = Place(
        engines=max(1, split.rollout // job.engine_devices),
        shared=split.shared,
        lead=lead,
        decode=job.speeds.decode,
        prefill=job.speeds.prefill,
        capacity=capacity,
        learn=learn,
        publish=_publishing(job, split, shards),
        drain=job.drain and lead > 0,
    )
    first = lead + 2
    steps = simulate(job.work, place, first + STEPS)
    messages = _messages(job, split.learners, parallel, job.step_tokens, micro)
    return _summary(empty, steps[first - 1 :], place, messages)


def best(predictions: list[Prediction]) -> Prediction | None:
    return min((p for p in predictions if p.fits), key=lambda p: p.step, default=None)


# -- learning ---------------------------------------------------------------------------------------------------------


def _computing(job: Job, ranks: int, shards: int, tokens: float, longest: float) -> float:
    """A row is not cut: with more ranks than rows, the longest row is what a step waits for."""
    fullest = max(tokens / ranks, longest)
    return job.updates * job.speeds.learn_fixed / shards + job.epochs * fullest * job.speeds.learn_token


def _messages(job: Job, ranks: int, parallel: str, tokens: float, micro: int) -> float:
    if ranks == 1:
        return 0.0
    share = (ranks - 1) / ranks / job.device.between(ranks)
    gradients = 4 * job.shape.parameters * job.training.trained
    if parallel == "ddp":
        return job.updates * 2 * gradients * share
    passes = math.ceil(job.epochs * tokens / ranks / job.updates / micro)
    return job.updates * passes * (2 * job.device.itemsize * job.shape.parameters + gradients) * share


def _publishing(job: Job, split: Split, shards: int) -> float:
    if split.shared and split.learners == 1 and job.speeds.publish is not None:
        return job.speeds.publish
    weights = job.device.itemsize * job.shape.parameters
    if split.shared and shards == 1:
        return weights / job.device.bandwidth
    devices = split.learners if split.shared else split.learners + split.rollout
    return weights / job.device.between(devices) * (2 if shards > 1 and not split.shared else 1)


# -- memory -----------------------------------------------------------------------------------------------------------


def _room(job: Job) -> float:
    return USABLE * job.device.memory


def _parallel(job: Job, split: Split) -> str:
    if split.learners == 1:
        return "ddp"
    if job.parallel != "auto":
        return job.parallel
    row = job.longest * activation_bytes(job.shape, job.device.itemsize, checkpointing=job.training.checkpointing)
    lasting = states(job.shape, job.device, job.training, 1).total + row
    if split.shared:
        lasting += job.device.itemsize * job.shape.parameters  # the engine's
    return "ddp" if lasting <= 0.8 * _room(job) else "fsdp"


def _memory(job: Job, split: Split, shards: int, lead: int) -> tuple[Memory, Memory, int, int]:
    """Of a learner's device and an engine's, sequences that an engine decodes together, tokens of a micro-batch. On
    shared devices the cache takes its share of what the learner's lasting tensors leave."""
    room, episodes = _room(job), job.work.groups * job.work.attempts * (lead + 1)
    engine_room = room
    if split.shared:
        left = room - states(job.shape, job.device, job.training, shards).total
        own = job.device.itemsize * job.shape.parameters / job.engine_devices
        engine_room = own + max(0.0, left - own) * job.cache_share
    fit = most_sequences(job.shape, job.device, job.context, job.engine_devices, engine_room)
    capacity = min(job.max_sequences, fit)
    engines = max(1, split.rollout // job.engine_devices)
    sequences = min(capacity, math.ceil(episodes / engines))
    engine = engine_memory(job.shape, job.device, sequences, job.context, job.engine_devices)
    for_learner = room - (engine.total if split.shared else 0.0)
    tokens = max(job.step_tokens / split.learners / job.updates, job.longest)
    learner, micro = learner_memory(job.shape, job.device, job.training, shards, tokens, for_learner)
    if split.shared:
        both = Memory(**{**vars(learner), "weights": learner.weights + engine.weights, "cache": engine.cache})
        return both, both, capacity, micro
    return learner, engine, capacity, micro


def _summary(empty: Prediction, steps: list[Step], place: Place, messages: float) -> Prediction:
    """Over all steps but the first, which is where the clock starts."""
    first, counted = steps[0], steps[1:]
    seconds = counted[-1].ended - first.ended
    learning = sum(step.learning for step in counted)
    return Prediction(
        empty.split,
        empty.lead,
        empty.parallel,
        empty.learner,
        empty.engine,
        fits=True,
        learning=learning / len(counted),
        messages=messages,
        publishing=place.publish,
        step=seconds / len(counted),
        tokens_per_second=sum(step.tokens for step in counted) / seconds,
        learner_busy=learning / seconds,
        engines_busy=(counted[-1].engines_busy - first.engines_busy) / seconds / place.engines,
        age=sum(step.age * step.tokens for step in counted) / sum(step.tokens for step in counted),
        age_max=max(step.age_max for step in counted),
    )
