"""Figures of one device, each with where it comes from: measured, or assumed.

Seconds of a decoding step with n sequences are a line between known points. Seconds of learning are a line too: a
part that every update takes and a part for every token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


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
