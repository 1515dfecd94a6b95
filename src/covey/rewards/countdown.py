"""The reward for countdown: an expression that makes the target, checked exactly."""

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

from covey.errors import Absent, InputError
from covey.imports import install_extra
from covey.rewards.answers import tagged
from covey.rewards.function import reward
from covey.rewards.math.rewards import whole_numbers
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


# -- The reward for tasks of the package reasoning-gym: each family's own scorer ---------------------------------------
# Some scorers let sympy parse what the model wrote, which may take long: this reward runs in a worker.


def _check_reasoning_gym(task: Task) -> None:
    if "entry" not in task.columns or "dataset" not in task.columns:
        raise InputError(f"{task.where} is not of reasoning-gym\n  fix: the reward reasoning_gym goes with its data")
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as error:
        raise Absent(
            f"reward reasoning_gym needs the package reasoning-gym\n  fix: {install_extra('reasoning-gym')}"
        ) from error


@reward(check=_check_reasoning_gym)
def reasoning_gym(
    final_answer: str, entry: Mapping[str, Any], dataset: str, dataset_options: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """What the package's scorer says of the text in <answer>, or of the whole reply where there is none: 0 to 1.
    Scorers raise at some answers that they cannot parse, which earn 0; the extra `unread` is 1 there."""
    inside = tagged(final_answer)
    said = (final_answer if inside is None else inside).strip()
    scorer = _family(dataset, json.dumps(dataset_options or {}, sort_keys=True))
    try:
        return {"reward": float(scorer.score_answer(said, dict(entry))), "unread": 0.0}
    except Exception:  # int("no idea"), and whatever else: with a task of its own, only the answer can be at fault
        return {"reward": 0.0, "unread": 1.0}


@lru_cache(maxsize=64)
def _family(name: str, options: str) -> Any:
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    given = json.loads(options)
    if name == "composite":
        given["datasets"] = [DatasetSpec(**({"weight": 1.0, "config": {}} | part)) for part in given["datasets"]]
    return reasoning_gym.create_dataset(name, size=1, seed=0, **given)
