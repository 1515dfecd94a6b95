"""Bytes on each device.

    learner   weights + gradients + optimiser, whole (ddp) or shared out (fsdp); a reference model; activations of one
              micro-batch
    engine    weights and the key-value cache of the sequences that it decodes together

In half precision a parameter takes 2 bytes, its gradient 6 (one of the pass, one summed in float32), masters and
moments 12; in float32 4, 4 and 8. Activations take 3 · intermediate + 6.5 · hidden numbers per layer and token, which
is what an H200 showed with Qwen2.5-0.5B; with gradient checkpointing one `hidden`, and a single layer's.
"""

from __future__ import annotations

from dataclasses import dataclass

from covey.simulate.hardware import Device
from covey.simulate.shape import Shape

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
