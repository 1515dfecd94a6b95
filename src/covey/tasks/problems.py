"""One generated problem, and the checks that options of generated tasks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
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


# -- Small problems about numbers: sort them, calculate with two, name the largest -------------------------------------

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


# -- Countdown: reach a target with given numbers and the four operations ----------------------------------------------

LARGEST_NUMBER = 25


@dataclass(frozen=True)
class Countdown:
    """Reach a target with some numbers, each used at most once. Every target can be reached."""

    count: int = 3  # numbers given
    target_max: int = 99  # targets lie between 1 and this

    reward = "countdown"
    system = None
    examples = 0

    def __post_init__(self) -> None:
        # Beyond these bounds hardly any draw lands on a target that is small enough.
        whole_number("count", self.count, 2, 6)
        whole_number("target_max", self.target_max, 10, 1_000_000)

    def draw(self, rng: Random) -> Problem:
        while True:
            numbers = [rng.randint(1, LARGEST_NUMBER) for _ in range(self.count)]
            target, solution = _combine(rng, numbers)
            # A target that is one of the numbers asks for nothing.
            if target <= self.target_max and target not in numbers:
                break
        listed = ", ".join(map(str, numbers))
        return Problem(
            key=f"countdown:{','.join(map(str, sorted(numbers)))}={target}",
            question=(
                f"Using the numbers {listed} and the operations + - * /, make {target}. "
                "Use each number at most once. End with a line that holds only the expression."
            ),
            answer=None,
            columns={"numbers": numbers, "target": target, "solution": solution},
        )


def _combine(rng: Random, numbers: list[int]) -> tuple[int, str]:
    """Join two of the numbers at a time by an operation whose result is a positive whole number, until one is left."""
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


# symbol → (whether the result is a positive whole number, the result)
COUNTDOWN_OPERATIONS: Mapping[str, tuple[Callable[[int, int], bool], Callable[[int, int], int]]] = {
    "+": (lambda a, b: True, lambda a, b: a + b),
    "-": (lambda a, b: a > b, lambda a, b: a - b),
    "*": (lambda a, b: True, lambda a, b: a * b),
    "/": (lambda a, b: a % b == 0, lambda a, b: a // b),
}


# -- Sums that a small model gets wrong by itself and right with a calculator, and demonstrations of using one ---------
# Demonstrations show the least: one phrasing, two numbers, one call, the result. Tasks ask the same and more: other
# words, little stories, two operations. So imitation teaches how a call is written, and what to put into it is left to
# learn. No expression that is demonstrated is ever asked: a digest of it decides on which side it is.

DEMONSTRATED = 0.3  # share of all expressions
SIGNS: dict[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}

ONE = {
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
TWO = {
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
    """Arithmetic in words, beyond what a small model can do in its head."""

    digits: int = 3  # of the numbers; some have one more
    two_steps: float = 0.4  # share of questions with two operations
    stories: bool = True  # the last phrasing of each kind is a little story

    reward = "number"
    system = "Use the calculator. Then reply with the number only."
    examples = 0
    tools = ("calculator",)

    def __post_init__(self) -> None:
        whole_number("digits", self.digits, 1, 12)

    def draw(self, rng: Random) -> Problem:
        while True:
            two = rng.random() < self.two_steps
            form, phrasings = self._two(rng) if two else self._one(rng)
            numbers = self._numbers(rng, form)
            problem = _problem(form, rng.choice(phrasings if self.stories else phrasings[:-1]), numbers)
            if not is_demonstrated(problem.key):
                return problem

    def demonstrate(self, rng: Random) -> tuple[str, tuple[dict[str, Any], ...]]:
        """A problem's key, and how it is solved."""
        while True:
            form, phrasings = self._one(rng)
            problem = _problem(form, phrasings[0], self._numbers(rng, form))
            if is_demonstrated(problem.key):
                return problem.key, _solved(self.system, problem)

    def _one(self, rng: Random) -> tuple[str, tuple[str, ...]]:
        sign = rng.choice(tuple(SIGNS))
        return f"{{a}} {sign} {{b}}", ONE[sign]

    def _two(self, rng: Random) -> tuple[str, tuple[str, ...]]:
        form = rng.choice(tuple(TWO))
        return form, TWO[form]

    def _numbers(self, rng: Random, form: str) -> dict[str, int]:
        """Nothing that is counted is ever negative."""
        a, b, c = (rng.choice(numbers_with(self.digits + rng.randrange(2))) for _ in range(3))
        if form == "{a} - {b}":
            a, b = max(a, b), min(a, b)
        return {"a": a, "b": b, "c": min(c, a * b)}


def _problem(form: str, phrasing: str, numbers: dict[str, int]) -> Problem:
    a, b, c = numbers["a"], numbers["b"], numbers["c"]
    values = {"({a} + {b}) * {c}": (a + b) * c, "{a} * {b} - {c}": a * b - c, "{a} * {b} + {c}": a * b + c}
    value = values[form] if form in values else SIGNS[form.split()[1]](a, b)
    low, high = sorted((a, b))
    return Problem(
        key=f"calculator:{form.format(a=low, b=high, c=c)}",  # whichever of the two comes first
        question=phrasing.format(**numbers),
        answer=str(value),
        columns={"expression": form.format(**numbers)},
    )


def is_demonstrated(key: str) -> bool:
    """Whether an expression is for demonstrations; all others are for tasks."""
    digest = blake2b(key.encode(), digest_size=8, salt=b"demonstrated").digest()
    return int.from_bytes(digest, "big") < DEMONSTRATED * 2**64


def _solved(system: str, problem: Problem) -> tuple[dict[str, Any], ...]:
    """One call, its result, and the number alone."""
    call = {"name": "calculator", "arguments": {"expression": problem.columns["expression"]}}
    return (
        {"role": "system", "content": system},
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "calculator", "content": problem.answer},
        {"role": "assistant", "content": problem.answer},
    )
