"""Countdown: reach a target with given numbers and the four operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from covey.tasks.problem import Problem, whole_number

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
        allowed = [symbol for symbol, (possible, _) in OPERATIONS.items() if possible(left, right)]
        symbol = rng.choice(allowed)
        result = OPERATIONS[symbol][1](left, right)
        terms.append((result, f"({left_text} {symbol} {right_text})"))
    value, text = terms[0]
    return value, text.removeprefix("(").removesuffix(")")


# symbol → (whether the result is a positive whole number, the result)
OPERATIONS: Mapping[str, tuple[Callable[[int, int], bool], Callable[[int, int], int]]] = {
    "+": (lambda a, b: True, lambda a, b: a + b),
    "-": (lambda a, b: a > b, lambda a, b: a - b),
    "*": (lambda a, b: True, lambda a, b: a * b),
    "/": (lambda a, b: a % b == 0, lambda a, b: a // b),
}
