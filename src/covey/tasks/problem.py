"""One generated problem, and the checks that options of generated tasks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from covey.errors import InputError


@dataclass(frozen=True, slots=True)
class Problem:
    key: str  # equal for two problems that are the same, however they are put; becomes the task's id
    question: str
    answer: str | None
    columns: Mapping[str, Any]


def whole_number(option: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(f"data.options.{option} must be a whole number from {low} to {high}, got {value!r}")


def numbers_with(digits: int) -> range:
    """All numbers with exactly that many digits; 0 is not among them."""
    return range(10 ** (digits - 1), 10**digits)


def enough_numbers(count: int, digits: int) -> None:
    available = len(numbers_with(digits))
    if count > available:
        raise InputError(
            f"data.options.count={count}, but only {available} numbers have {digits} digit{'s' if digits > 1 else ''}\n"
            f"  fix: data.options.count={available} at most, or more data.options.digits"
        )
