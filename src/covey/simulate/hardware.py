"""What devices can do, from their makers' data sheets. Nothing here was measured on them."""

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
NODE = 8  # GPUs of a machine that are joined by the fast link


@dataclass(frozen=True)
class Device:
    name: str
    flops: float  # of matrix products per second: bfloat16 without sparsity, on a CPU float32
    bandwidth: float  # of its memory, bytes per second
    memory: float  # bytes
    link: float  # to another device of the same machine, bytes per second in one direction
    network: float  # to a device of another machine, bytes per second in one direction
    launch: float  # seconds that a layer takes however little there is to compute
    efficiency: float  # share of `flops` that training reaches
    itemsize: int  # bytes of a weight

    def between(self, ranks: int) -> float:
        """Bytes per second among so many devices: the slowest link counts."""
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


# -- The sizes of a model that decide its memory and its time ----------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    source: str  # where it comes from
    known: bool = True  # false: guessed from the model's name

    @classmethod
    def of(cls, config: Any, source: str) -> Shape:
        """Of a transformers configuration."""
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
        """Entries of the matrices of all layers; norms and biases are thousands of times smaller."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def output(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def multiplied(self) -> int:
        """Entries that a token is multiplied with: an input matrix of its own is only looked up."""
        return self.body + self.output

    @property
    def parameters(self) -> int:
        return self.body + self.output * (1 if self.tied else 2)

    def kv_bytes(self, itemsize: int) -> int:
        """Of one token in the cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


# Billions of parameters → layers, hidden, intermediate, heads, key-value heads: sizes that are usual.
_USUAL = {
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
    """The usual shape of the size that a name says (…-7B-…), for a model whose files are not here."""
    found = re.search(r"(?<![0-9.])(\d+(?:\.\d+)?)\s*([bm])(?![a-z0-9])", name.lower())
    if found is None:
        return None
    billions = float(found[1]) / (1000 if found[2] == "m" else 1)
    size = min(_USUAL, key=lambda usual: abs(usual - billions) / billions)
    layers, hidden, intermediate, heads, kv_heads = _USUAL[size]
    return Shape(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocabulary=151_936,
        tied=size <= 3,
        source=f"usual for {size:g}B, by the name {name}",
        known=False,
    )


# -- Figures of one device, each with where it comes from: measured, or assumed ----------------------------------------
# Seconds of a decoding step with n sequences are a line between known points. Seconds of learning are a line too: a
# part that every update takes and a part for every token.


@dataclass(frozen=True)
class Figure:
    """A number as the report shows it."""

    name: str
    text: str
    measured: bool
    source: str

    @property
    def label(self) -> str:
        return "measured" if self.measured else "assumed"


@dataclass(frozen=True)
class Decode:
    """Seconds of one decoding step, which gives every sequence of the batch a token."""

    points: tuple[tuple[float, float], ...]  # (sequences, seconds), sequences rising

    def __post_init__(self) -> None:
        assert self.points and all(a[0] < b[0] for a, b in zip(self.points, self.points[1:], strict=False))

    @classmethod
    def line(cls, fixed: float, per_sequence: float) -> Decode:
        return cls(((0.0, fixed), (1.0, fixed + per_sequence)))

    def seconds(self, sequences: float) -> float:
        """Between two points by their line, beyond the outermost by the line of the two nearest."""
        if len(self.points) == 1:
            return self.points[0][1]
        at = min(max(bisect_left(self.points, (sequences,)), 1), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[at - 1], self.points[at]
        return max(y0 + (y1 - y0) * (sequences - x0) / (x1 - x0), min(y for _, y in self.points) / 10)

    def scaled(self, factor: float) -> Decode:
        return Decode(tuple((n, seconds * factor) for n, seconds in self.points))


@dataclass(frozen=True)
class Speeds:
    """Of one device."""

    decode: Decode
    prefill: float  # seconds for a token of a prompt
    learn_token: float  # seconds for a token that is learned from, all passes together
    learn_fixed: float  # seconds of an update, however few its tokens
    publish: float | None = None  # seconds, as measured in one process; None: by bytes and bandwidth


@dataclass(frozen=True)
class Turn:
    """A reply of the model, and what comes after it."""

    tokens: int
    wait: float = 0.0  # seconds of its tool, before the next reply
    given: int = 0  # tokens that come in between: the tool's answer


@dataclass(frozen=True)
class Episodes:
    """What answers look like: each is one of `seen`, drawn anew."""

    seen: tuple[tuple[Turn, ...], ...]
    prompt: int  # tokens, computed once for a group

    @property
    def tokens(self) -> float:
        """Sampled in an episode, in the mean."""
        return sum(turn.tokens for episode in self.seen for turn in episode) / len(self.seen)

    @property
    def length(self) -> float:
        """Of a row without its prompt: what was sampled, and what was given in between."""
        return sum(turn.tokens + turn.given for episode in self.seen for turn in episode) / len(self.seen)

    @property
    def waits(self) -> float:
        """Seconds of tools in an episode, in the mean."""
        return sum(turn.wait for episode in self.seen for turn in episode) / len(self.seen)


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float] | None:
    """(a, b) of y = a + b·x by least squares, or None where the points do not tell: x hardly varies, or a part would
    be negative."""
    count = len(xs)
    mean_x, mean_y = sum(xs) / count, sum(ys) / count
    spread = sum((x - mean_x) ** 2 for x in xs)
    if count < 4 or spread < count * (0.1 * mean_x) ** 2:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    fixed = mean_y - slope * mean_x
    return (fixed, slope) if fixed >= 0 and slope > 0 else None


# -- Figures from a model's size and a device's data sheet, where nobody has measured ----------------------------------
# a decoding step of n sequences    layers · launch + (weights + n · context · KV bytes) / bandwidth
# + 2 · parameters · n / rate
# learning from a token             (6 · parameters + 12 · layers · d_q · context / 2) / (rate · efficiency)
# an update                         16 bytes of weights, moments and gradients read and written, per parameter
#
# The launch and the efficiency are those that an H200 showed with Qwen2.5 of 0.5B to 7B (docs/benchmarks.md).

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
