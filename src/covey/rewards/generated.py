"""Rewards for generated tasks: `sorted`, `countdown`, and `reasoning_gym`, which calls that package's own scorers."""

from __future__ import annotations

import ast
import json
import math
import operator
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from covey.errors import InputError
from covey.imports import require
from covey.rewards.answers import tagged
from covey.rewards.function import inline, reward
from covey.types import Task

# -- sorted and countdown ----------------------------------------------------------------------------------------------

MAX_LENGTH = 200  # characters of an expression; bounds the depth of its tree and the size of its numbers
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
PRINTED = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})
# A run of digits, operators and parentheses. "- 3 + 4" is a list item, "-3 + 4" has a sign (and is refused).
RUN = re.compile(r"-?[(0-9][0-9+\-*/(). \t]*")


def _check_numbers(task: Task) -> None:
    """The column `numbers` must be a list of integers. Text, as in a CSV file, would be read letter by letter."""
    numbers = task.columns["numbers"]
    is_list = isinstance(numbers, Sequence) and not isinstance(numbers, str)
    if not is_list or not all(isinstance(one, int) and not isinstance(one, bool) for one in numbers):
        raise ValueError(f"numbers must be a list of whole numbers, got {numbers!r:.60}")


@inline
@reward(name="sorted", check=_check_numbers)
def sorted_numbers(numbers: Sequence[int], final_answer: str) -> dict[str, float]:
    """1 if the reply is the sorted numbers, written `1 2 3`.

    Extra `lenient`: 1 if the reply's last len(numbers) numbers are the sorted ones, whatever text surrounds them.
    """
    expected = list(map(str, sorted(numbers)))
    return {
        "reward": float(final_answer.strip() == " ".join(expected)),
        "lenient": float(re.findall("[0-9]+", final_answer)[-len(expected) :] == expected),
    }


def _check_countdown(task: Task) -> None:
    _check_numbers(task)
    target = task.columns["target"]
    if not isinstance(target, int | float) or not math.isfinite(target):
        raise ValueError(f"target must be a number, got {target!r:.60}")


@inline
@reward(check=_check_countdown)
def countdown(numbers: Sequence[int], target: int, final_answer: str) -> float:
    """1 if the reply's last expression evaluates to the target and uses each number at most once."""
    expression = last_expression(final_answer)
    if expression is None or len(expression) > MAX_LENGTH:
        return 0.0
    used: list[int] = []
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # `3(4)` would print a warning
            tree = ast.parse(expression, mode="eval").body
        value = _evaluate(tree, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    return float(value == target and Counter(used) <= Counter(numbers))


def last_expression(text: str) -> str | None:
    """The expression on the last line that has one. In `3 * 7 + 25 = 21 + 25 = 46` it is the leftmost side."""
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
    """The exact value of an expression of + - * / over integers; the integers are appended to `used`."""
    match node:
        case ast.Constant(value=int(value)):
            used.append(value)
            return Fraction(value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_evaluate(left, used), _evaluate(right, used))
    raise ValueError(f"{type(node).__name__} is not allowed")


# -- reasoning_gym -----------------------------------------------------------------------------------------------------


def _check_reasoning_gym(task: Task) -> None:
    if "entry" not in task.columns or "dataset" not in task.columns:
        raise InputError(
            f"{task.where} is not a reasoning-gym task\n  fix: use the reward reasoning_gym with data=reasoning_gym"
        )
    require("reasoning_gym", "reasoning-gym", "reward reasoning_gym needs the package reasoning-gym")


@reward(check=_check_reasoning_gym)
def reasoning_gym(
    final_answer: str, entry: Mapping[str, Any], dataset: str, dataset_options: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """The score, 0 to 1, that the package gives the text in <answer>, or the whole reply without that tag. Some scorers
    raise on answers they cannot parse; these earn 0, and the extra `unread` is 1.

    It runs in a worker, because some scorers let sympy parse the model's text, which may take long.
    """
    inside = tagged(final_answer)
    text = (final_answer if inside is None else inside).strip()
    scorer = _dataset(dataset, json.dumps(dataset_options or {}, sort_keys=True))
    try:
        return {"reward": float(scorer.score_answer(text, dict(entry))), "unread": 0.0}
    except Exception:  # e.g. int("no idea"); the entry is the package's own, so only the answer can be at fault
        return {"reward": 0.0, "unread": 1.0}


@lru_cache(maxsize=64)
def _dataset(name: str, options: str) -> Any:
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    arguments = json.loads(options)
    if name == "composite":
        parts = [{"weight": 1.0, "config": {}} | part for part in arguments["datasets"]]
        arguments["datasets"] = [DatasetSpec(**part) for part in parts]
    return reasoning_gym.create_dataset(name, size=1, seed=0, **arguments)
