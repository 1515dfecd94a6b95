"""Sums that a small model gets wrong by itself and right with a calculator, and demonstrations of using one.

Demonstrations show the least: one phrasing, two numbers, one call, the result. Tasks ask the same and more: other
words, little stories, two operations. So imitation teaches how a call is written, and what to put into it is left to
learn. No expression that is demonstrated is ever asked: a digest of it decides on which side it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Any

from covey.tasks.problem import Problem, numbers_with, whole_number

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
