"""The reward for countdown: an expression that makes the target, checked exactly."""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

from covey.rewards.function import reward
from covey.rewards.numbers import whole_numbers
from covey.types import Task

MAX_LENGTH = 200  # characters of an expression; bounds the depth of its tree and the size of its numbers
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
PRINTED = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})
# A run of digits, operators and parentheses. "- 3 + 4" is an item of a list, "-3 + 4" has a sign (and is refused).
RUN = re.compile(r"-?[(0-9][0-9+\-*/(). \t]*")


def _check(task: Task) -> None:
    whole_numbers(task)
    target = task.columns["target"]
    if not isinstance(target, int | float) or not math.isfinite(target):
        raise ValueError(f"target must be a number, got {target!r:.60}")


@reward(check=_check)
def countdown(numbers: Sequence[int], target: int, final_answer: str) -> float:
    """1 if the last expression of the reply makes the target and uses each number at most once."""
    expression = last_expression(final_answer)
    if expression is None or len(expression) > MAX_LENGTH:
        return 0.0
    try:
        used: list[int] = []
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # `3(4)` is worth no line on a console
            tree = ast.parse(expression, mode="eval").body
        value = _evaluate(tree, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    return float(value == target and Counter(used) <= Counter(numbers))


def last_expression(text: str) -> str | None:
    """The expression on the last line that has one. In `3 * 7 + 25 = 21 + 25 = 46` it is the first side that counts."""
    for line in reversed(text.translate(PRINTED).splitlines()):
        for side in line.split("="):
            runs = [run.strip(" \t") for run in RUN.findall(side)]
            expressions = [
                run.rstrip("+-*/(. \t") for run in runs if re.search(r"[0-9)][ \t]*[+\-*/]+[ \t]*[(0-9]", run)
            ]
            if expressions:
                return expressions[-1]
    return None


def _evaluate(node: ast.expr, used: list[int]) -> Fraction:
    """The exact value of a tree of + - * / over whole numbers; `used` collects the numbers."""
    match node:
        case ast.Constant(value=int(value)):
            used.append(value)
            return Fraction(value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_evaluate(left, used), _evaluate(right, used))
    raise ValueError(f"{type(node).__name__} is not allowed")
