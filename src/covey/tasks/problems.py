"""Families of generated problems: sort, largest, arithmetic, countdown and calculator.

Each family is a frozen dataclass whose fields are its `data.options`, validated on construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Any

from covey.errors import InputError

VALIDATION_SHARE = 0.2
MAX_COUNT = 100
MAX_DIGITS = 15
MAX_EXAMPLES = 20
OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass(frozen=True, slots=True)
class Problem:
    key: str  # equal for equivalent problems, however they are phrased; becomes the task's id
    question: str
    answer: str | None
    columns: Mapping[str, Any]


def in_validation(key: str) -> bool:
    """Whether a problem is for validation, whatever the seeds and sizes."""
    digest = blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < VALIDATION_SHARE * 2**64


def check_range(option: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(f"data.options.{option} must be a whole number from {low} to {high}, got {value!r}")


def _numbers_with(digits: int) -> range:
    """All positive numbers with exactly that many digits."""
    return range(10 ** (digits - 1), 10**digits)


def _listed(numbers: Iterable[int], separator: str = ", ") -> str:
    return separator.join(map(str, numbers))


# -- sort, largest, arithmetic -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _DistinctNumbers:
    """Options of problems about a set of distinct numbers."""

    count: int = 3  # how many numbers
    digits: int = 2  # digits of each
    examples: int = 1  # worked examples before the question

    def __post_init__(self) -> None:
        check_range("digits", self.digits, 1, MAX_DIGITS)
        check_range("count", self.count, 2, MAX_COUNT)
        check_range("examples", self.examples, 0, MAX_EXAMPLES)
        available = len(_numbers_with(self.digits))
        if self.count > available:
            digits = f"{self.digits} digit{'s' if self.digits > 1 else ''}"
            raise InputError(
                f"data.options.count={self.count}, but only {available} numbers have {digits}\n"
                f"  fix: data.options.count={available} at most, or more data.options.digits"
            )

    def _sample(self, rng: Random) -> list[int]:
        return rng.sample(_numbers_with(self.digits), self.count)


@dataclass(frozen=True)
class Sort(_DistinctNumbers):
    """Sort distinct numbers."""

    reward = "sorted"
    system = "Reply with numbers only."

    def draw(self, rng: Random) -> Problem:
        numbers = self._sample(rng)
        return Problem(
            key=f"sort:{_listed(sorted(numbers), ',')}",
            question=f"Sort from smallest to largest: {_listed(numbers, ' ')}",
            answer=_listed(sorted(numbers), " "),
            columns={"numbers": numbers},
        )


@dataclass(frozen=True)
class Largest(_DistinctNumbers):
    """Name the largest of distinct numbers."""

    reward = "number"
    system = "Reply with a number only."

    def draw(self, rng: Random) -> Problem:
        numbers = self._sample(rng)
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
        check_range("digits", self.digits, 1, MAX_DIGITS)
        check_range("examples", self.examples, 0, MAX_EXAMPLES)
        symbols = self.operations
        if not isinstance(symbols, Sequence) or not symbols or any(one not in tuple(OPERATIONS) for one in symbols):
            raise InputError(f"data.options.operations must be a list of + - *, got {self.operations!r}")

    def draw(self, rng: Random) -> Problem:
        operation = rng.choice(self.operations)
        first, second = rng.choice(_numbers_with(self.digits)), rng.choice(_numbers_with(self.digits))
        low, high = sorted((first, second))
        if operation == "-":
            first, second = high, low
        return Problem(
            key=f"arithmetic:{operation}:{low},{high}",
            question=f"What is {first} {operation} {second}?",
            answer=str(OPERATIONS[operation](first, second)),
            columns={"numbers": [first, second], "operation": operation},
        )


# -- countdown ---------------------------------------------------------------------------------------------------------

LARGEST_NUMBER = 25

# symbol → (whether the result is a positive integer, the result)
COUNTDOWN_OPERATIONS: Mapping[str, tuple[Callable[[int, int], bool], Callable[[int, int], int]]] = {
    "+": (lambda a, b: True, lambda a, b: a + b),
    "-": (lambda a, b: a > b, lambda a, b: a - b),
    "*": (lambda a, b: True, lambda a, b: a * b),
    "/": (lambda a, b: a % b == 0, lambda a, b: a // b),
}


@dataclass(frozen=True)
class Countdown:
    """Reach a target with the four operations, using each given number at most once. Every target can be reached."""

    count: int = 3  # numbers given
    target_max: int = 99  # targets are between 1 and this

    reward = "countdown"
    system = None
    examples = 0

    def __post_init__(self) -> None:
        # Outside these bounds, hardly any draw yields a small enough target.
        check_range("count", self.count, 2, 6)
        check_range("target_max", self.target_max, 10, 1_000_000)

    def draw(self, rng: Random) -> Problem:
        while True:
            numbers = [rng.randint(1, LARGEST_NUMBER) for _ in range(self.count)]
            target, solution = _combine(rng, numbers)
            if target <= self.target_max and target not in numbers:  # otherwise the problem is trivial
                break
        return Problem(
            key=f"countdown:{_listed(sorted(numbers), ',')}={target}",
            question=(
                f"Using the numbers {_listed(numbers)} and the operations + - * /, make {target}. "
                "Use each number at most once. End with a line that holds only the expression."
            ),
            answer=None,
            columns={"numbers": numbers, "target": target, "solution": solution},
        )


def _combine(rng: Random, numbers: list[int]) -> tuple[int, str]:
    """Repeatedly join two numbers by an operation whose result is a positive integer, until one is left."""
    terms = [(number, str(number)) for number in numbers]
    while len(terms) > 1:
        rng.shuffle(terms)
        (left, left_text), (right, right_text) = terms.pop(), terms.pop()
        allowed = [symbol for symbol, (possible, _) in COUNTDOWN_OPERATIONS.items() if possible(left, right)]
        symbol = rng.choice(allowed)
        result = COUNTDOWN_OPERATIONS[symbol][1](left, right)
        terms.append((result, f"({left_text} {symbol} {right_text})"))
    value, text = terms[0]
    return value, text.removeprefix("(").removesuffix(")")


# -- calculator: too hard for a small model alone, solvable with the calculator tool -----------------------------------

DEMONSTRATED = 0.3  # share of all expressions

ONE_STEP = {
    "+": (
        "What is {a} + {b}?",
        "What is {a} plus {b}?",
        "Add {a} to {b}.",
        "Find the sum of {a} and {b}.",
        "A library has {a} books and buys {b} more. How many books does it have now?",
    ),
    "-": (
        "What is {a} - {b}?",
        "What is {a} minus {b}?",
        "Subtract {b} from {a}.",
        "How much more is {a} than {b}?",
        "A shop had {a} pens and sold {b} of them. How many are left?",
    ),
    "*": (
        "What is {a} * {b}?",
        "What is {a} times {b}?",
        "Multiply {a} by {b}.",
        "Find the product of {a} and {b}.",
        "A box holds {a} screws. How many screws are in {b} boxes?",
    ),
}
TWO_STEPS = {
    "({a} + {b}) * {c}": (
        "Calculate ({a} + {b}) * {c}.",
        "Add {a} and {b}, then multiply the result by {c}.",
        "A farm sends {a} apples and {b} pears to each of {c} shops. How many fruits does it send?",
    ),
    "{a} * {b} - {c}": (
        "Calculate {a} * {b} - {c}.",
        "Multiply {a} by {b}, then subtract {c}.",
        "A school buys {b} boxes of {a} pencils and gives {c} pencils away. How many pencils are left?",
    ),
    "{a} * {b} + {c}": (
        "Calculate {a} * {b} + {c}.",
        "What is {c} more than {a} times {b}?",
        "A hall has {b} rows of {a} seats and {c} seats at the side. How many seats are there?",
    ),
}


@dataclass(frozen=True)
class Calculator:
    """Arithmetic word problems, with demonstrations of using the calculator tool.

    Demonstrations are minimal: one phrasing, two numbers, one call, the result. Tasks add other phrasings, short
    stories and a second operation. Imitation thus teaches the format of a call, and RL what to put into it. A digest of
    the expression decides whether it is demonstrated or asked, so no expression is both.
    """

    digits: int = 3  # of the numbers; some have one more
    two_steps: float = 0.4  # share of questions with two operations
    stories: bool = True  # include the last phrasing of each kind, a short story

    reward = "number"
    system = "Use the calculator. Then reply with the number only."
    examples = 0
    tools = ("calculator",)

    def __post_init__(self) -> None:
        check_range("digits", self.digits, 1, 12)

    def draw(self, rng: Random) -> Problem:
        while True:
            two = rng.random() < self.two_steps
            form, phrasings = self._two_steps(rng) if two else self._one_step(rng)
            numbers = self._numbers(rng, form)
            problem = _problem(form, rng.choice(phrasings if self.stories else phrasings[:-1]), numbers)
            if not is_demonstrated(problem.key):
                return problem

    def demonstrate(self, rng: Random) -> tuple[str, tuple[dict[str, Any], ...]]:
        """A problem's key, and a conversation that solves it by one call."""
        while True:
            form, phrasings = self._one_step(rng)
            problem = _problem(form, phrasings[0], self._numbers(rng, form))
            if is_demonstrated(problem.key):
                break
        call = {"name": "calculator", "arguments": {"expression": problem.columns["expression"]}}
        return problem.key, (
            {"role": "system", "content": self.system},
            {"role": "user", "content": problem.question},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "name": "calculator", "content": problem.answer},
            {"role": "assistant", "content": problem.answer},
        )

    def _one_step(self, rng: Random) -> tuple[str, tuple[str, ...]]:
        symbol = rng.choice(tuple(OPERATIONS))
        return f"{{a}} {symbol} {{b}}", ONE_STEP[symbol]

    def _two_steps(self, rng: Random) -> tuple[str, tuple[str, ...]]:
        form = rng.choice(tuple(TWO_STEPS))
        return form, TWO_STEPS[form]

    def _numbers(self, rng: Random, form: str) -> dict[str, int]:
        """Numbers for which no result is negative."""
        a, b, c = (rng.choice(_numbers_with(self.digits + rng.randrange(2))) for _ in range(3))
        if form == "{a} - {b}":
            a, b = max(a, b), min(a, b)
        return {"a": a, "b": b, "c": min(c, a * b)}


def _problem(form: str, phrasing: str, numbers: dict[str, int]) -> Problem:
    a, b, c = numbers["a"], numbers["b"], numbers["c"]
    values = {"({a} + {b}) * {c}": (a + b) * c, "{a} * {b} - {c}": a * b - c, "{a} * {b} + {c}": a * b + c}
    value = values[form] if form in values else OPERATIONS[form.split()[1]](a, b)
    low, high = sorted((a, b))
    return Problem(
        key=f"calculator:{form.format(a=low, b=high, c=c)}",  # the same for both orders
        question=phrasing.format(**numbers),
        answer=str(value),
        columns={"expression": form.format(**numbers)},
    )


def is_demonstrated(key: str) -> bool:
    """Whether an expression is for demonstrations; all others are for tasks."""
    digest = blake2b(key.encode(), digest_size=8, salt=b"demonstrated").digest()
    return int.from_bytes(digest, "big") < DEMONSTRATED * 2**64
