"""Devices, model shapes, and the speeds and lengths that a simulation starts from.

Device data comes from the makers' data sheets. Where nothing was measured, speeds follow from the model's size:

    decoding step, n sequences   layers · launch + (weights + n · context · KV bytes) / bandwidth
                                 + 2 · parameters · n / rate
    learning, per token          (6 · parameters + 12 · layers · d_q · context / 2) / (rate · efficiency)
    update                       16 bytes of weights, moments and gradients read and written, per parameter

Launch time and efficiency are those of an H200 with Qwen2.5 of 0.5B to 7B (docs/benchmarks.md).
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.errors import unknown

GIB = 2**30
NODE = 8  # GPUs of a machine, connected by the fast link
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LENGTH_SIGMA = 0.7  # standard deviation of the logarithm of an answer's length
FORWARD_PASS = 1 / 3  # share of a forward pass in forward and backward


@dataclass(frozen=True)
class Device:
    name: str
    flops: float  # matmul FLOP/s: bfloat16 without sparsity, on a CPU float32
    bandwidth: float  # memory bandwidth, bytes/s
    memory: float  # bytes
    link: float  # to another device of the same machine, bytes/s in one direction
    network: float  # to a device of another machine, bytes/s in one direction
    launch: float  # kernel launch time: lower bound in seconds per layer
    efficiency: float  # share of `flops` that training reaches
    itemsize: int  # bytes per weight

    def slowest_link(self, ranks: int) -> float:
        """Bytes per second of the slowest link among `ranks` devices."""
        return self.link if ranks <= NODE else self.network


DEVICES = {
    device.name: device
    for device in (
        Device("a100", 312e12, 2.0e12, 80 * GIB, 300e9, 25e9, 55e-6, 0.4, 2),
        Device("h100", 989e12, 3.35e12, 80 * GIB, 450e9, 50e9, 55e-6, 0.4, 2),
        Device("h200", 989e12, 4.8e12, 141e9, 450e9, 50e9, 55e-6, 0.4, 2),
        Device("b200", 2250e12, 8.0e12, 180e9, 900e9, 50e9, 55e-6, 0.4, 2),
        # Two cores of a server, as in docs/benchmarks.md.
        Device("cpu", 189e9, 32e9, 16 * GIB, 5e9, 1e9, 150e-6, 0.7, 4),
    )
}


def device(name: str) -> Device:
    if name not in DEVICES:
        raise unknown("device", name, DEVICES)
    return DEVICES[name]


# -- Model shapes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that determine its memory and speed."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    source: str  # where the sizes come from

    @classmethod
    def from_config(cls, config: Any, source: str) -> Shape:
        """From a transformers configuration."""
        text = config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=text.intermediate_size,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            vocabulary=text.vocab_size,
            tied=text.tie_word_embeddings,
            source=source,
        )

    @property
    def body(self) -> int:
        """Parameters of the matrices of all layers. Norms and biases are negligible."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def output(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def multiplied(self) -> int:
        """Parameters that a token is multiplied with. Untied input embeddings are only looked up."""
        return self.body + self.output

    @property
    def parameters(self) -> int:
        return self.body + self.output * (1 if self.tied else 2)

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of one token in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


# Billions of parameters → layers, hidden, intermediate, heads, KV heads of common models.
_COMMON = {
    0.14: (30, 576, 1536, 9, 3),
    0.5: (24, 896, 4864, 14, 2),
    1.5: (28, 1536, 8960, 12, 2),
    3.0: (36, 2048, 11008, 16, 2),
    7.0: (28, 3584, 18944, 28, 4),
    14.0: (48, 5120, 13824, 40, 8),
    32.0: (64, 5120, 27648, 40, 8),
    72.0: (80, 8192, 29568, 64, 8),
}


def shape_from_name(name: str) -> Shape | None:
    """A common shape of the size in the name (…-7B-…), for a model that is not on this machine."""
    match = re.search(r"(?<![0-9.])(\d+(?:\.\d+)?)\s*([bm])(?![a-z0-9])", name.lower())
    if match is None:
        return None
    billions = float(match[1]) / (1000 if match[2] == "m" else 1)
    size = min(_COMMON, key=lambda common: abs(common - billions) / billions)
    layers, hidden, intermediate, heads, kv_heads = _COMMON[size]
    source = f"usual for {size:g}B, by the name {name}"
    sizes = (layers, hidden, intermediate, heads, kv_heads, hidden // heads, 151_936)
    return Shape(*sizes, tied=size <= 3, source=source)


# -- Speeds and lengths ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """An input of the simulation as the report shows it."""

    name: str
    text: str
    measured: bool
    source: str

    @property
    def label(self) -> str:
        return "measured" if self.measured else "assumed"


@dataclass(frozen=True)
class DecodeCurve:
    """Seconds of a decoding step, which gives every sequence of the batch a token, by batch size."""

    points: tuple[tuple[float, float], ...]  # (sequences, seconds), sequences ascending

    def __post_init__(self) -> None:
        assert self.points and all(a[0] < b[0] for a, b in zip(self.points, self.points[1:], strict=False))

    @classmethod
    def line(cls, fixed: float, per_sequence: float) -> DecodeCurve:
        return cls(((0.0, fixed), (1.0, fixed + per_sequence)))

    def seconds(self, sequences: float) -> float:
        """Interpolated linearly; extrapolated from the two nearest points."""
        if len(self.points) == 1:
            return self.points[0][1]
        at = min(max(bisect_left(self.points, (sequences,)), 1), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[at - 1], self.points[at]
        return max(y0 + (y1 - y0) * (sequences - x0) / (x1 - x0), min(y for _, y in self.points) / 10)

    def scaled(self, factor: float) -> DecodeCurve:
        return DecodeCurve(tuple((n, seconds * factor) for n, seconds in self.points))

    @property
    def text(self) -> str:
        return ", ".join(f"{n / self.seconds(n):,.0f} tokens/s with {n}" for n in (1, 16, 256)) + " sequences"


@dataclass(frozen=True)
class Speeds:
    """The speeds of one device."""

    decode: DecodeCurve
    prefill: float  # seconds per prompt token
    learn_token: float  # seconds per trained token, all passes together
    learn_fixed: float  # seconds per update, independent of its tokens
    publish: float | None = None  # seconds, as measured in one process; None: from bytes and bandwidth

    @property
    def learn_text(self) -> str:
        return f"{1 / self.learn_token:,.0f} tokens/s, and {self.learn_fixed:.3g} s an update"


@dataclass(frozen=True)
class Turn:
    """A reply of the model and the tool call that follows."""

    tokens: int
    wait: float = 0.0  # seconds of the tool call
    observation: int = 0  # tokens of the tool's output


@dataclass(frozen=True)
class Episodes:
    """A distribution of episodes: each simulated one is drawn from `examples`."""

    examples: tuple[tuple[Turn, ...], ...]
    prompt: int  # tokens, computed once per group

    @property
    def tokens(self) -> float:
        """Mean sampled tokens per episode."""
        return sum(turn.tokens for turns in self.examples for turn in turns) / len(self.examples)

    @property
    def length(self) -> float:
        """Mean length of a row without its prompt: sampled tokens and observations."""
        return sum(turn.tokens + turn.observation for turns in self.examples for turn in turns) / len(self.examples)

    @property
    def waits(self) -> float:
        """Mean seconds of tools per episode."""
        return sum(turn.wait for turns in self.examples for turn in turns) / len(self.examples)


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float] | None:
    """(a, b) of y = a + b·x by least squares; None if x hardly varies or a coefficient would be negative."""
    count = len(xs)
    mean_x, mean_y = sum(xs) / count, sum(ys) / count
    spread = sum((x - mean_x) ** 2 for x in xs)
    if count < 4 or spread < count * (0.1 * mean_x) ** 2:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    fixed = mean_y - slope * mean_x
    return (fixed, slope) if fixed >= 0 and slope > 0 else None


def assumed_speeds(
    shape: Shape, device: Device, context: float, *, passes: float = 1.0, checkpointing: bool = False, split: int = 1
) -> Speeds:
    """`passes`: forward-and-backward passes per token; a reference model counts a third.

    `split`: devices that share one engine; messages between them are not counted.
    """
    weights = shape.multiplied * device.itemsize / split
    kv = shape.kv_bytes(device.itemsize) * context / split

    def decoding(sequences: int) -> float:
        moved = (weights + sequences * kv) / device.bandwidth
        return shape.layers * device.launch + moved + 2 * shape.multiplied * sequences / device.flops / split

    rate = device.flops * device.efficiency
    attention = 12 * shape.layers * shape.heads * shape.head_dim * context / 2
    recompute = 4 / 3 if checkpointing else 1.0  # a second forward pass
    return Speeds(
        decode=DecodeCurve(tuple((float(n), decoding(n)) for n in BATCHES)),
        prefill=2 * shape.multiplied / rate / split,
        learn_token=passes * recompute * (6 * shape.multiplied + attention) / rate,
        learn_fixed=2 * 16 * shape.parameters / device.bandwidth,
    )


def assumed_episodes(
    *, answer: int, longest: int, prompt: int, turns: int, wait: tuple[float, float], count: int = 512
) -> Episodes:
    """Log-normal lengths with the median `answer`, at most `longest`; tool seconds uniform in a range."""
    draw = random.Random("episodes 0")

    def turn(last: bool) -> Turn:
        tokens = min(longest, max(1, round(answer * math.exp(draw.gauss(0.0, LENGTH_SIGMA)))))
        return Turn(tokens) if last else Turn(tokens, draw.uniform(*wait), observation=min(longest, 64))

    return Episodes(tuple(tuple(turn(at == turns - 1) for at in range(turns)) for _ in range(count)), prompt)


def assumed_figures(shape: Shape, device: Device, speeds: Speeds) -> list[Figure]:
    source = f"data sheet of {device.name}, {shape.parameters / 1e9:.2f}B parameters ({shape.source})"
    return [
        Figure("decoding", speeds.decode.text, False, source),
        Figure("learning", speeds.learn_text, False, f"{source}, {100 * device.efficiency:.0f} % of its rate"),
    ]
