"""Ranges of settings, as annotations of dataclass fields.

    lr: Annotated[float, Range(0, 1)] = 1e-5          both bounds are allowed, NaN and infinity never
    clip_weight: Positive | None = None               null is allowed
    weights: dict[str, Weight] = ...                  the range of every value

Range checks, `covey config explain`, docs/settings.md and the property test read the annotations.
"""

from __future__ import annotations

import numbers
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any

from covey.errors import InputError

SHOWN = 100  # characters of a value in an error


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`. Both bounds are finite, so NaN and infinity are always outside."""

    low: float
    high: float
    above: bool = False  # exclude `low`
    below: bool = False  # exclude `high`
    hint: str = ""  # why lower values make no sense, if the bound is not obvious

    def __contains__(self, value: float) -> bool:
        over = self.low < value if self.above else self.low <= value
        return over and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        if not self.above and not self.below:
            return f"from {_number(self.low)} to {_number(self.high)}"
        start = "above" if self.above else "at least"
        return f"{start} {_number(self.low)} and {'below' if self.below else 'at most'} {_number(self.high)}"

    def is_below(self, value: float) -> bool:
        return value <= self.low


@dataclass(frozen=True)
class Length:
    """Text of `low` to `high` characters."""

    low: int
    high: int
    hint: str = ""  # why a shorter text makes no sense

    def __contains__(self, value: str) -> bool:
        return self.low <= len(value) <= self.high

    def __str__(self) -> str:
        return f"of {_number(self.low)} to {_number(self.high)} characters"

    def is_below(self, value: str) -> bool:
        return len(value) < self.low


# Ranges that several settings share. Upper bounds are far above practical values, but low enough to catch a typo before
# it fills the memory.
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(0, 1, above=True)]
ShareBelowOne = Annotated[float, Range(0, 1, below=True)]
AnyTemperature = Annotated[float, Range(0, 100)]  # 0: greedy
TopK = Annotated[int, Range(0, 10_000_000)]  # 0: all tokens
StopText = Annotated[str, Length(1, 1000, hint="an empty text would end every answer before its first token")]
Coefficient = Annotated[float, Range(0, 1e6)]
Positive = Annotated[float, Range(0, 1e6, above=True)]
Weight = Annotated[float, Range(-1e6, 1e6)]
Cap = Annotated[float, Range(0, 1e30)]  # a huge cap is a common way to write "no cap"
PositiveCap = Annotated[float, Range(0, 1e30, above=True)]
Epsilon = Annotated[float, Range(0, 1000)]
Steps = Annotated[int, Range(0, 1_000_000_000)]
Interval = Annotated[int, Range(1, 1_000_000_000)]  # in steps
Tokens = Annotated[int, Range(1, 10_000_000)]
Seconds = Annotated[float, Range(0.001, 1_000_000)]  # 11 days; system calls that wait accept at most 24


@dataclass(frozen=True)
class Allowed:
    """The allowed values of a field: a range and the type around it."""

    within: Range | Length
    kind: type  # of one value: int, float or str
    null: bool = False
    several: bool = False  # a list or dict of such values

    def __contains__(self, value: Any) -> bool:
        if value is None:
            return self.null
        if not self.several:
            return self._is_kind(value) and value in self.within
        items = value.values() if isinstance(value, Mapping) else value
        return isinstance(value, Mapping | list | tuple) and all(item in self.entry for item in items)

    @property
    def entry(self) -> Allowed:
        """The allowed values of one entry of a list or dict."""
        return replace(self, several=False, null=False)

    def _is_kind(self, value: Any) -> bool:
        kind: type = {int: numbers.Integral, float: numbers.Real, str: str}[self.kind]
        return isinstance(value, kind) and not isinstance(value, bool)

    def hint(self, value: Any) -> str:
        """The hint for a value outside of the range, if any."""
        if self.several and isinstance(value, list | tuple):
            return next(filter(None, map(self.entry.hint, value)), "")
        return self.within.hint if self._is_kind(value) and self.within.is_below(value) else ""

    def __str__(self) -> str:
        kind = {int: "a whole number", float: "a number", str: "text"}[self.kind]
        return f"{kind} {self.within}{' in every entry' * self.several}{', or null' * self.null}"


def allowed(hint: Any) -> Allowed | None:
    """The allowed values of a resolved type hint with annotations; None if it states no range."""
    annotations = list(_annotated(hint))
    if not annotations:
        return None
    kind, within = annotations[0]
    inner = next((arg for arg in _union(hint) if arg is not type(None)), hint)
    several = typing.get_origin(inner) in (list, tuple, dict)
    return Allowed(within, kind, type(None) in _union(hint), several)


def _annotated(hint: Any) -> Iterator[tuple[type, Range | Length]]:
    if typing.get_origin(hint) is Annotated:
        kind, *notes = typing.get_args(hint)
        yield from ((kind, note) for note in notes if isinstance(note, Range | Length))
    else:
        for inner in typing.get_args(hint):
            yield from _annotated(inner)


def _union(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def type_text(hint: Any) -> str:
    """A type hint as text without its annotations: `int | None`, `dict[str, float]`."""
    if typing.get_origin(hint) is Annotated:
        return type_text(typing.get_args(hint)[0])
    if len(options := _union(hint)) > 1:
        return " | ".join(map(type_text, options))
    if hint is type(None):
        return "None"
    if inner := typing.get_args(hint):
        return f"{typing.get_origin(hint).__name__}[{', '.join(map(type_text, inner))}]"
    return str(getattr(hint, "__name__", hint))


@cache
def ranges_of(cls: type) -> dict[str, Allowed]:
    """Field → allowed values, for the fields of a dataclass that state a range."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {item.name: found for item in fields(cls) if (found := allowed(hints[item.name])) is not None}


def check_ranges(section: Any, prefix: str) -> None:
    """Raise an InputError about all fields of a dataclass that are out of range. The settings are `prefix` + field."""
    cls: type = type(section)
    wrong = [
        range_error(f"{prefix}{name}", getattr(section, name), what)
        for name, what in ranges_of(cls).items()
        if getattr(section, name) not in what
    ]
    if wrong:
        raise InputError("\n".join(wrong))


def range_error(name: str, value: Any, what: Allowed, note: str = "") -> str:
    """The error about a value that is out of range. `name` is the setting as the user typed it; `note` ends the first
    line."""
    shown = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    short = shown if len(shown) <= SHOWN else f"{shown[: SHOWN - 1]}…"
    hint = what.hint(value)
    return f"{name} must be {what}, got {short}{note}" + (f"\n  {hint}" if hint else "")


def _number(bound: float) -> str:
    """Whole numbers with separators; very large ones with an exponent."""
    whole = float(bound).is_integer() and abs(bound) < 1e12
    return f"{int(bound):,}" if whole else f"{bound:g}"
