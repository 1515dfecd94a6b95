"""Predicts several splits of the devices between learner and engines: memory per device, step time, and a report.

Memory:

    learner      weights + gradients + optimiser, replicated (ddp) or sharded (fsdp); a reference model; activations of
                 one micro-batch
    engine       weights and the KV cache of the sequences that it decodes at once

In half precision a parameter takes 2 bytes, its gradient 6 (the pass's own and a sum in float32), masters and moments
12; in float32 4, 4 and 8. Activations take 3 · intermediate + 6.5 · hidden values per layer and token, as measured
on an H200 with Qwen2.5-0.5B; with gradient checkpointing one `hidden` per layer, and all values of a single layer.

Time:

    learning     tokens of the fullest rank · seconds per token + updates · seconds per update + messages
    messages     ddp: 2 (r − 1)/r · gradients, every update; fsdp: (r − 1)/r · (2 · weights + gradients), every
                 micro-batch; over the slowest link among r ranks, without overlap with computation
    publishing   the weights once over the slowest link, and once more if they are sharded
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from covey.simulate.hardware import GIB, NODE, Device, Figure, Shape, Speeds
from covey.simulate.simulation import Deployment, StepResult, Workload, simulate
from covey.telemetry.jsonl import finite

USABLE = 0.92  # of a device's memory; the rest goes to the driver and to fragmentation
MAX_MICRO_BATCH = 65_536  # tokens
MEASURED_STEPS = 6  # simulated steps that are averaged, after a warm-up


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    weights: float = 0.0
    gradients: float = 0.0
    optimiser: float = 0.0
    reference: float = 0.0
    activations: float = 0.0
    cache: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Training:
    """The settings that determine the learner's memory."""

    reference: bool = False
    checkpointing: bool = False
    trained: float = 1.0  # share of trained parameters; small for adapters
    offload_optimizer: bool = False
    offload_reference: bool = False
    micro_batch_tokens: int | None = None


def activation_bytes(shape: Shape, itemsize: int, *, checkpointing: bool) -> float:
    """Bytes per token."""
    layer = itemsize * (3 * shape.intermediate + 6.5 * shape.hidden)
    return shape.layers * itemsize * shape.hidden + layer if checkpointing else shape.layers * layer


def states(shape: Shape, device: Device, training: Training, shards: int) -> Memory:
    """The persistent tensors of a learner on one of `shards` devices."""
    half = device.itemsize < 4
    trained = shape.parameters * training.trained / shards
    return Memory(
        weights=device.itemsize * shape.parameters / shards,
        gradients=(6 if half else 4) * trained,
        optimiser=0.0 if training.offload_optimizer else (12 if half else 8) * trained,
        reference=device.itemsize * shape.parameters / shards
        if training.reference and training.trained == 1 and not training.offload_reference
        else 0.0,
    )


def learner_memory(
    shape: Shape, device: Device, training: Training, shards: int, tokens: float, available: float
) -> tuple[Memory, int]:
    """Memory and tokens of a micro-batch: as set, or as many of the rank's `tokens` as fit into `available` bytes."""
    persistent = states(shape, device, training, shards)
    each = activation_bytes(shape, device.itemsize, checkpointing=training.checkpointing)
    fit = int(max(0.0, available - persistent.total) / each)
    budget = training.micro_batch_tokens or min(MAX_MICRO_BATCH, fit)
    micro = max(1, min(budget, int(tokens) or 1))
    return replace(persistent, activations=micro * each), micro


def engine_memory(shape: Shape, device: Device, sequences: int, context: float, split: int) -> Memory:
    """`split`: devices that share one engine."""
    cache = sequences * context * shape.kv_bytes(device.itemsize) / split
    return Memory(weights=device.itemsize * shape.parameters / split, cache=cache)


def max_sequences(shape: Shape, device: Device, context: float, split: int, available: float) -> int:
    """Sequences of this length that fit into an engine's cache."""
    free = available - device.itemsize * shape.parameters / split
    return int(max(0.0, free) * split / (context * shape.kv_bytes(device.itemsize)))


# -- Splits ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    learners: int  # devices
    rollout: int  # devices; the same as the learner's if shared
    shared: bool

    @property
    def name(self) -> str:
        return f"{self.learners} shared" if self.shared else f"{self.learners} + {self.rollout}"


@dataclass(frozen=True)
class Job:
    """The run to predict and its hardware."""

    work: Workload
    speeds: Speeds  # of one device; decoding of one engine
    shape: Shape
    device: Device
    training: Training
    updates: int = 1  # optimiser steps per training step
    epochs: int = 1
    parallel: str = "auto"  # auto | ddp | fsdp
    engine_devices: int = 1  # devices that share one engine
    max_sequences: int = 256
    cache_share: float = 0.5  # of the free memory, if learner and engine share devices
    drain: bool = False

    @property
    def usable_memory(self) -> float:
        return USABLE * self.device.memory

    @property
    def context(self) -> float:
        """Mean tokens of a row with its prompt."""
        return self.work.episodes.prompt + self.work.episodes.length

    @property
    def step_tokens(self) -> float:
        work = self.work
        return work.groups * (work.episodes.prompt + work.attempts * work.episodes.length)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        rows = (sum(turn.tokens + turn.observation for turn in turns) for turns in self.work.episodes.examples)
        return self.work.episodes.prompt + max(rows)


@dataclass(frozen=True)
class Prediction:
    split: Split
    lead: int  # 0: synchronous
    parallel: str
    learner: Memory  # of one device; includes the engine's if shared
    engine: Memory
    fits: bool
    learning: float = math.nan  # seconds of a mean step, messages included
    messages: float = math.nan  # seconds
    publishing: float = math.nan  # seconds
    step: float = math.nan  # seconds
    tokens_per_second: float = math.nan
    learner_busy: float = math.nan  # share of the time
    engines_busy: float = math.nan
    age: float = math.nan  # mean policy age of the tokens
    age_max: int = 0

    @property
    def mode(self) -> str:
        return f"async, staleness {self.lead}" if self.lead else "sync"


def all_splits(devices: int, engine_devices: int = 1) -> list[Split]:
    """All devices shared, and a few fractions of them for rollout; whole machines from two machines on."""
    grain = math.lcm(NODE if devices >= 2 * NODE else 1, engine_devices)
    fractions = {round(devices * share / grain) * grain for share in (1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8)}
    separate = [Split(devices - rollout, rollout, False) for rollout in sorted(fractions) if 0 < rollout < devices]
    shared = [Split(devices, devices, True)] if devices % engine_devices == 0 else []
    return shared + separate


def predict(job: Job, split: Split, lead: int) -> Prediction:
    parallel = _parallel(job, split)
    shards = split.learners if parallel == "fsdp" else 1
    learner, engine, capacity, micro = _memory(job, split, shards, lead)
    empty = Prediction(split, lead, parallel, learner, engine, fits=False)
    if micro < job.longest or capacity < 1 or max(learner.total, engine.total) > job.usable_memory:
        return empty

    def messages(tokens: float) -> float:
        return _messages(job, split.learners, parallel, tokens, micro)

    def learn(tokens: float, longest: float) -> float:
        # Rows are not split: with more ranks than rows, a step waits for the longest row.
        fullest = max(tokens / split.learners, longest)
        computing = job.updates * job.speeds.learn_fixed / shards + job.epochs * fullest * job.speeds.learn_token
        return computing + messages(tokens)

    deployment = Deployment(
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
    warm_up = lead + 2
    steps = simulate(job.work, deployment, warm_up + MEASURED_STEPS)[warm_up - 1 :]
    return _summary(empty, steps, deployment, messages(job.step_tokens))


def best(predictions: list[Prediction]) -> Prediction | None:
    return min((p for p in predictions if p.fits), key=lambda p: p.step, default=None)


def _messages(job: Job, ranks: int, parallel: str, tokens: float, micro: int) -> float:
    if ranks == 1:
        return 0.0
    share = (ranks - 1) / ranks / job.device.slowest_link(ranks)
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
    return weights / job.device.slowest_link(devices) * (2 if shards > 1 and not split.shared else 1)


def _parallel(job: Job, split: Split) -> str:
    if split.learners == 1:
        return "ddp"
    if job.parallel != "auto":
        return job.parallel
    row = job.longest * activation_bytes(job.shape, job.device.itemsize, checkpointing=job.training.checkpointing)
    needed = states(job.shape, job.device, job.training, 1).total + row
    if split.shared:
        needed += job.device.itemsize * job.shape.parameters  # weights of the engine
    return "ddp" if needed <= 0.8 * job.usable_memory else "fsdp"


def _memory(job: Job, split: Split, shards: int, lead: int) -> tuple[Memory, Memory, int, int]:
    """Memory of a learner's and an engine's device, sequences per engine, tokens of a micro-batch.

    On shared devices the cache takes its share of the memory that the learner's persistent tensors leave free.
    """
    usable, episodes = job.usable_memory, job.work.groups * job.work.attempts * (lead + 1)
    for_engine = usable
    if split.shared:
        free = usable - states(job.shape, job.device, job.training, shards).total
        weights = job.device.itemsize * job.shape.parameters / job.engine_devices
        for_engine = weights + max(0.0, free - weights) * job.cache_share
    fit = max_sequences(job.shape, job.device, job.context, job.engine_devices, for_engine)
    capacity = min(job.max_sequences, fit)
    engines = max(1, split.rollout // job.engine_devices)
    sequences = min(capacity, math.ceil(episodes / engines))
    engine = engine_memory(job.shape, job.device, sequences, job.context, job.engine_devices)
    for_learner = usable - (engine.total if split.shared else 0.0)
    tokens = max(job.step_tokens / split.learners / job.updates, job.longest)
    learner, micro = learner_memory(job.shape, job.device, job.training, shards, tokens, for_learner)
    if split.shared:
        both = replace(learner, weights=learner.weights + engine.weights, cache=engine.cache)
        return both, both, capacity, micro
    return learner, engine, capacity, micro


def _summary(prediction: Prediction, steps: list[StepResult], deployment: Deployment, messages: float) -> Prediction:
    """Averages over all steps but the first, at whose end the clock starts."""
    first, counted = steps[0], steps[1:]
    seconds = counted[-1].ended - first.ended
    learning = sum(step.learning for step in counted)
    return replace(
        prediction,
        fits=True,
        learning=learning / len(counted),
        messages=messages,
        publishing=deployment.publish,
        step=seconds / len(counted),
        tokens_per_second=sum(step.tokens for step in counted) / seconds,
        learner_busy=learning / seconds,
        engines_busy=(counted[-1].engines_busy - first.engines_busy) / seconds / deployment.engines,
        age=sum(step.age * step.tokens for step in counted) / sum(step.tokens for step in counted),
        age_max=max(step.age_max for step in counted),
    )


# -- Report ------------------------------------------------------------------------------------------------------------

CAVEAT = (
    "A prediction from figures of one device. It was checked against small runs on one machine (docs/simulate.md);\n"
    "no accuracy is claimed beyond that scale. Comparisons between splits are more reliable than absolute times."
)
HEADER = (
    *("", "learner + rollout", "mode", "s/step", "tokens/s", "learner busy", "engines busy"),
    *("age mean", "age max", "learner GiB", "engine GiB"),
)


def report_text(title: str, figures: Sequence[Figure], predictions: list[Prediction]) -> str:
    chosen = best(predictions)
    rows = [_cells(p, chosen is p) for p in predictions]
    lines = [title, "", *_aligned([HEADER, *rows]), ""]
    if chosen is None:
        lines += ["Nothing fits: use more devices, gradient checkpointing, or rollout.tensor_parallel", ""]
    else:
        lines += [f"* the shortest step: {chosen.split.name}, {chosen.mode}", *_details(chosen), ""]
    sources = [("  " + figure.name, figure.text, f"({figure.label})", figure.source) for figure in figures]
    return "\n".join([*lines, "Figures", *_aligned(sources, right=False), "", CAVEAT])


def report_json(
    title: str, figures: Sequence[Figure], predictions: list[Prediction], settings: dict[str, Any]
) -> dict[str, Any]:
    chosen = best(predictions)
    return {
        "title": title,
        "settings": settings,
        "figures": [asdict(figure) for figure in figures],
        "splits": [finite(asdict(p)) | {"mode": p.mode, "best": chosen is p} for p in predictions],
        "caveat": CAVEAT,
    }


def _cells(p: Prediction, chosen: bool) -> tuple[str, ...]:
    head = ("*" if chosen else "", p.split.name, p.mode)
    memory = (f"{p.learner.total / GIB:.1f}", f"{p.engine.total / GIB:.1f}")
    if not p.fits:
        return (*head, "does not fit", "", "", "", "", "", *memory)
    return (
        *head,
        f"{p.step:.3g}",
        f"{p.tokens_per_second:,.0f}",
        f"{100 * p.learner_busy:.0f} %",
        f"{100 * p.engines_busy:.0f} %",
        f"{p.age:.2f}",
        str(p.age_max),
        *memory,
    )


def _details(p: Prediction) -> list[str]:
    """Step time and memory of the best split by component."""
    lines = [
        f"  learning {p.learning:.3g} s, of which messages between {p.split.learners} devices ({p.parallel}) "
        f"{p.messages:.3g} s (assumed); publishing {p.publishing:.3g} s",
        f"  learner's device, GiB (assumed): {_memory_lines(p.learner)}",
    ]
    return lines if p.split.shared else [*lines, f"  engine's device, GiB (assumed): {_memory_lines(p.engine)}"]


def _memory_lines(memory: Memory) -> str:
    return ", ".join(f"{name} {value / GIB:.2f}" for name, value in asdict(memory).items() if value)


def _aligned(rows: Sequence[Sequence[str]], *, right: bool = True) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]

    def cell(text: str, at: int) -> str:
        return text.rjust(widths[at]) if right and at > 2 else text.ljust(widths[at])

    return ["  ".join(cell(text, at) for at, text in enumerate(row)).rstrip() for row in rows]
