"""Small problems about numbers: sort them, calculate with two, name the largest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from covey.errors import InputError
from covey.tasks.problem import Problem, enough_numbers, numbers_with, whole_number

MAX_COUNT = 100
MAX_DIGITS = 15
MAX_EXAMPLES = 20


@dataclass(frozen=True)
class Sort:
    """Sort distinct numbers."""

    count: int = 3  # numbers to sort
    digits: int = 2  # digits of each
    examples: int = 1  # worked examples before the question

    reward = "sorted"
    system = "Reply with numbers only."

    def __post_init__(self) -> None:
        _check_numbers(self.count, self.digits, self.examples)

    def draw(self, rng: Random) -> Problem:
        numbers = rng.sample(numbers_with(self.digits), self.count)
        return Problem(
            key=f"sort:{_listed(sorted(numbers), ',')}",
            question=f"Sort from smallest to largest: {_listed(numbers, ' ')}",
            answer=_listed(sorted(numbers), " "),
            columns={"numbers": numbers},
        )


@dataclass(frozen=True)
class Largest:
    """Name the largest of distinct numbers."""

    count: int = 3  # numbers to choose from
    digits: int = 2  # digits of each
    examples: int = 1  # worked examples before the question

    reward = "number"
    system = "Reply with a number only."

    def __post_init__(self) -> None:
        _check_numbers(self.count, self.digits, self.examples)

    def draw(self, rng: Random) -> Problem:
        numbers = rng.sample(numbers_with(self.digits), self.count)
        return Problem(
            key=f"largest:{_listed(sorted(numbers), ',')}",
            question=f"Which is the largest: {_listed(numbers[:-1])} or {numbers[-1]}?",
            answer=str(max(numbers)),
            columns={"numbers": numbers},
        )


@dataclass(frozen=True)
class Arithmetic:
    """Add, subtract or multiply two numbers. Differences are never negative."""

    digits: int = 2  # digits of both numbers
    operations: Sequence[str] = ("+", "-")  # of + - *
    examples: int = 1  # worked examples before the question

    reward = "number"
    system = "Reply with a number only."

    def __post_init__(self) -> None:
        whole_number("digits", self.digits, 1, MAX_DIGITS)
        whole_number("examples", self.examples, 0, MAX_EXAMPLES)
        given = self.operations
        if not isinstance(given, Sequence) or not given or any(symbol not in tuple(OPERATIONS) for symbol in given):
            raise InputError(f"data.options.operations must be a list of + - *, got {self.operations!r}")

    def draw(self, rng: Random) -> Problem:
        operation = rng.choice(self.operations)
        first, second = rng.choice(numbers_with(self.digits)), rng.choice(numbers_with(self.digits))
        low, high = sorted((first, second))
        if operation == "-":
            first, second = high, low
        return Problem(
            key=f"arithmetic:{operation}:{low},{high}",
            question=f"What is {first} {operation} {second}?",
            answer=str(OPERATIONS[operation](first, second)),
            columns={"numbers": [first, second], "operation": operation},
        )


OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def _check_numbers(count: int, digits: int, examples: int) -> None:
    whole_number("digits", digits, 1, MAX_DIGITS)
    whole_number("count", count, 2, MAX_COUNT)
    whole_number("examples", examples, 0, MAX_EXAMPLES)
    enough_numbers(count, digits)


def _listed(numbers: Iterable[int], separator: str = ", ") -> str:
    return separator.join(map(str, numbers))
