"""Figures from a model's size and a device's data sheet, where nobody has measured.

    a decoding step of n sequences    layers · launch + (weights + n · context · KV bytes) / bandwidth
                                      + 2 · parameters · n / rate
    learning from a token             (6 · parameters + 12 · layers · d_q · context / 2) / (rate · efficiency)
    an update                         16 bytes of weights, moments and gradients read and written, per parameter

The launch and the efficiency are those that an H200 showed with Qwen2.5 of 0.5B to 7B (docs/benchmarks.md).
"""

from __future__ import annotations

import math
import random

from covey.simulate.figures import Decode, Episodes, Figure, Speeds, Turn
from covey.simulate.hardware import Device
from covey.simulate.shape import Shape

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SPREAD = 0.7  # of the logarithm of an answer's length
FORWARD_PASS = 1 / 3  # without a backward pass, as a share of both


def assumed_decode(shape: Shape, device: Device, context: float, split: int = 1) -> Decode:
    """`split`: devices that share one copy of the model; messages between them are left out."""
    weights = shape.multiplied * device.itemsize / split
    kv = shape.kv_bytes(device.itemsize) * context / split

    def seconds(sequences: int) -> float:
        moved = (weights + sequences * kv) / device.bandwidth
        return shape.layers * device.launch + moved + 2 * shape.multiplied * sequences / device.flops / split

    return Decode(tuple((float(n), seconds(n)) for n in BATCHES))


def assumed_speeds(
    shape: Shape, device: Device, context: float, *, passes: float = 1.0, checkpointing: bool = False, split: int = 1
) -> Speeds:
    """`passes`: forward-and-backward passes over every token; a reference model is a third of one."""
    rate = device.flops * device.efficiency
    attention = 12 * shape.layers * shape.heads * shape.head_dim * context / 2
    again = 4 / 3 if checkpointing else 1.0  # the forward pass is made twice
    return Speeds(
        decode=assumed_decode(shape, device, context, split),
        prefill=2 * shape.multiplied / rate / split,
        learn_token=passes * again * (6 * shape.multiplied + attention) / rate,
        learn_fixed=2 * 16 * shape.parameters / device.bandwidth,
    )


def assumed_episodes(
    *, answer: int, longest: int, prompt: int, turns: int, wait: tuple[float, float], seed: int = 0, count: int = 512
) -> Episodes:
    """Lengths of a log-normal distribution with the median `answer`, cut at `longest`; waits anywhere in a range."""
    draw = random.Random(f"episodes {seed}")

    def turn(last: bool) -> Turn:
        tokens = min(longest, max(1, round(answer * math.exp(draw.gauss(0.0, SPREAD)))))
        return Turn(tokens) if last else Turn(tokens, draw.uniform(*wait), given=min(longest, 64))

    return Episodes(tuple(tuple(turn(at == turns - 1) for at in range(turns)) for _ in range(count)), prompt)


def assumed_figures(shape: Shape, device: Device, speeds: Speeds) -> list[Figure]:
    why = f"data sheet of {device.name}, {shape.parameters / 1e9:.2f}B parameters ({shape.source})"
    return [
        Figure("decoding", decode_text(speeds.decode), False, why),
        Figure("learning", learn_text(speeds), False, f"{why}, {100 * device.efficiency:.0f} % of its rate"),
    ]


def decode_text(decode: Decode) -> str:
    shown = [f"{n / decode.seconds(n):,.0f} tokens/s with {n}" for n in (1, 16, 256)]
    return ", ".join(shown) + " sequences"


def learn_text(speeds: Speeds) -> str:
    return f"{1 / speeds.learn_token:,.0f} tokens/s, and {speeds.learn_fixed:.3g} s an update"
