"""Bytes on each device.

    learner   weights + gradients + optimiser, whole (ddp) or shared out (fsdp); a reference model; activations of one
              micro-batch
    engine    weights and the key-value cache of the sequences that it decodes together

In half precision a parameter takes 2 bytes, its gradient 6 (one of the pass, one summed in float32), masters and
moments 12; in float32 4, 4 and 8. Activations take 3 · intermediate + 6.5 · hidden numbers per layer and token, which
is what an H200 showed with Qwen2.5-0.5B; with gradient checkpointing one `hidden`, and a single layer's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from covey.simulate.hardware import GIB, NODE, Device, Figure, Shape, Speeds
from covey.simulate.simulation import Place, Step, Work, simulate

USABLE = 0.92  # of a device's memory: the rest is the driver's, and lost between tensors
MOST_TOKENS = 65_536  # of a micro-batch, however much memory there is


@dataclass(frozen=True)
class Memory:
    """Of one device, in bytes."""

    weights: float = 0.0
    gradients: float = 0.0
    optimiser: float = 0.0
    reference: float = 0.0
    activations: float = 0.0
    cache: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def lasting(self) -> float:
        """Without what comes and goes with a micro-batch or an answer."""
        return self.total - self.activations - self.cache


@dataclass(frozen=True)
class Training:
    """What of a run's settings decides its memory."""

    reference: bool = False
    checkpointing: bool = False
    trained: float = 1.0  # share of the parameters that is trained: adapters are few
    offload_optimizer: bool = False
    offload_reference: bool = False
    micro_batch_tokens: int | None = None


def activation_bytes(shape: Shape, itemsize: int, *, checkpointing: bool) -> float:
    """Of one token."""
    layer = itemsize * (3 * shape.intermediate + 6.5 * shape.hidden)
    return shape.layers * itemsize * shape.hidden + layer if checkpointing else shape.layers * layer


def states(shape: Shape, device: Device, training: Training, shards: int) -> Memory:
    """A learner's tensors that last, shared out over so many devices (1: each has all of them)."""
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
    shape: Shape, device: Device, training: Training, shards: int, tokens: float, room: float
) -> tuple[Memory, int]:
    """With the tokens of a micro-batch: as set, or as many of a rank's `tokens` as fit into `room` bytes."""
    lasting = states(shape, device, training, shards)
    each = activation_bytes(shape, device.itemsize, checkpointing=training.checkpointing)
    fit = int(max(0.0, room - lasting.total) / each)
    budget = training.micro_batch_tokens or min(MOST_TOKENS, fit)
    micro = max(1, min(budget, int(tokens) or 1))
    return Memory(**{**vars(lasting), "activations": micro * each}), micro


def engine_memory(shape: Shape, device: Device, sequences: int, context: float, split: int) -> Memory:
    """`split`: devices that share one copy of the model."""
    cache = sequences * context * shape.kv_bytes(device.itemsize) / split
    return Memory(weights=device.itemsize * shape.parameters / split, cache=cache)


def most_sequences(shape: Shape, device: Device, context: float, split: int, room: float) -> int:
    """How many answers of this length an engine has room for."""
    free = room - device.itemsize * shape.parameters / split
    return int(max(0.0, free) * split / (context * shape.kv_bytes(device.itemsize)))


# -- Several ways to split devices between learner and engines, and what each would give -------------------------------
# learning      tokens of the fullest rank · seconds of a token + updates · seconds of an update + messages
# messages      ddp: 2 (r − 1)/r · gradients, every update;  fsdp: (r − 1)/r · (2 · weights + gradients), every
# micro-batch; over the slowest link among r ranks, none of it hidden behind computing
# publishing    the weights once over the slowest link, and once more where they are shared out

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


# -- What a simulation found: a table of splits, where its figures come from, and the same as JSON ---------------------

CAVEAT = (
    "A prediction from figures of one device. It was checked against small runs on one machine (docs/simulate.md);\n"
    "no accuracy is claimed beyond that scale. Splits can be compared with each other sooner than with a clock."
)
HEADER = (
    "",
    "learner + rollout",
    "mode",
    "s/step",
    "tokens/s",
    "learner busy",
    "engines busy",
    "age mean",
    "age max",
    "learner GiB",
    "engine GiB",
)


def report_text(title: str, figures: Sequence[Figure], predictions: list[Prediction]) -> str:
    chosen = best(predictions)
    rows = [_cells(p, chosen is p) for p in predictions]
    lines = [title, "", *_aligned([HEADER, *rows]), ""]
    if chosen is None:
        lines += ["Nothing fits: more devices, gradient checkpointing, or rollout.tensor_parallel", ""]
    else:
        lines += [f"* the shortest step: {chosen.split.name}, {chosen.mode}", *_parts(chosen), ""]
    lines += ["Figures", *_figures(figures), "", CAVEAT]
    return "\n".join(lines)


def report_json(
    title: str, figures: Sequence[Figure], predictions: list[Prediction], settings: dict[str, Any]
) -> dict[str, Any]:
    chosen = best(predictions)
    return {
        "title": title,
        "settings": settings,
        "figures": [asdict(figure) for figure in figures],
        "splits": [_plain(p) | {"best": chosen is p} for p in predictions],
        "caveat": CAVEAT,
    }


def _plain(prediction: Prediction) -> dict[str, Any]:
    found = asdict(prediction) | {"mode": prediction.mode}
    return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in found.items()}


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


def _parts(p: Prediction) -> list[str]:
    """Of the best split: what its step and its memory are made of."""
    lines = [
        f"  learning {p.learning:.3g} s, of which messages between {p.split.learners} devices ({p.parallel}) "
        f"{p.messages:.3g} s (assumed); publishing {p.publishing:.3g} s",
        f"  learner's device, GiB (assumed): {_memory_lines(p.learner)}",
    ]
    return lines if p.split.shared else [*lines, f"  engine's device, GiB (assumed): {_memory_lines(p.engine)}"]


def _memory_lines(memory: Memory) -> str:
    return ", ".join(f"{name} {value / GIB:.2f}" for name, value in asdict(memory).items() if value)


def _figures(figures: Sequence[Figure]) -> list[str]:
    rows = [("  " + figure.name, figure.text, f"({figure.label})", figure.source) for figure in figures]
    return [line.rstrip() for line in _aligned(rows, right=False)]


def _aligned(rows: Sequence[Sequence[str]], *, right: bool = True) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]

    def cell(text: str, at: int) -> str:
        return text.rjust(widths[at]) if right and at > 2 else text.ljust(widths[at])

    return ["  ".join(cell(text, at) for at, text in enumerate(row)).rstrip() for row in rows]
