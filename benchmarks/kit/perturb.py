"""Corrupts answers and tests, to detect rewards that accept everything."""

from __future__ import annotations

import ast
import copy
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NUMBER = re.compile(r"(?<![\d.^_{\\])\d+(?:\.\d+)?")
PAIR = re.compile(r"(\\left)?([(\[])([^,()\[\]]+),([^,()\[\]]+)(\\right)?([)\]])")
LETTER = re.compile(r"(?<![A-Za-z\\{])([a-z])(?![A-Za-z}])")


# -- mathematics -------------------------------------------------------------------------------------------------------


def wrong_answers(answers: Sequence[str], count: int) -> list[tuple[str, str, str]]:
    """(kind, gold, wrong): alternates between the kinds of corruption until there are `count`."""
    draw = random.Random(0)
    order = draw.sample(list(dict.fromkeys(answers)), len(set(answers)))
    ways = {"number": _other_number, "sign": _other_sign, "ends": _swapped, "coefficient": _other_coefficient}
    made = {
        name: [(name, gold, wrong) for gold in order if (wrong := way(gold)) is not None] for name, way in ways.items()
    }
    found: list[tuple[str, str, str]] = []
    while len(found) < count:
        for name in made:
            if made[name] and len(found) < count:
                found.append(made[name].pop())
    return found


def _other_number(gold: str) -> str | None:
    """The answer with its first number increased by one."""
    found = NUMBER.search(gold)
    if found is None or "text" in gold or "mod" in gold:
        return None
    more = str(int(found[0]) + 1) if found[0].isdigit() else f"{float(found[0]) + 1:g}"
    return gold[: found.start()] + more + gold[found.end() :]


def _other_sign(gold: str) -> str | None:
    plain = re.fullmatch(r"-?(?:\d+(?:\.\d+)?|\\d?frac\{\d+\}\{\d+\}|\d*\\sqrt\{\d+\}|\d+\\pi)", gold)
    if plain is None or not re.search(r"[1-9]", gold):
        return None
    return gold[1:] if gold.startswith("-") else "-" + gold


def _swapped(gold: str) -> str | None:
    """The answer with swapped ends of an interval, or swapped items of a pair."""
    found = PAIR.fullmatch(gold)
    if found is None or found[3].strip() == found[4].strip():
        return None
    return f"{found[1] or ''}{found[2]}{found[4]},{found[3]}{found[5] or ''}{found[6]}"


def _other_coefficient(gold: str) -> str | None:
    """The answer with one of its letters multiplied by three."""
    if any(mark in gold for mark in ("text", "mbox", "=", "\\in", ",")) or len(gold) < 2:
        return None
    found = LETTER.search(gold)
    return None if found is None else f"{gold[: found.start()]}(3{found[1]}){gold[found.end() :]}"


# -- tests of programs -------------------------------------------------------------------------------------------------


def wrong_test(source: str) -> str:
    """The tests with a wrong first assertion: its literal is replaced by an unequal one, or the assertion is negated if
    it has no literal."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
            node.test = _denied(node.test)
            return ast.unparse(ast.fix_missing_locations(tree))
    raise ValueError("no assertion")


def _denied(test: ast.expr) -> ast.expr:
    changed = copy.deepcopy(test)
    place = _expected(changed)
    if place is not None and _change(place):
        return changed
    return ast.UnaryOp(ast.Not(), test)


def _expected(test: ast.expr) -> tuple[Any, str, int | None] | None:
    """The place of the expected value: `f() == X`, `abs(f() - X) < small`, `isclose(f(), X)`."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
        return test.comparators, "", 0
    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Call) and ast.unparse(test.left.func) == "abs":
        inner = test.left.args[0]
        return (inner, "right", None) if isinstance(inner, ast.BinOp) else None
    if isinstance(test, ast.Call) and ast.unparse(test.func).endswith("isclose"):
        return test.args, "", 1
    return None


def _change(place: tuple[Any, str, int | None]) -> bool:
    owner, name, index = place
    node = owner[index] if index is not None else getattr(owner, name)
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return False
    new = ast.parse(repr(other_value(value)), mode="eval").body
    if index is not None:
        owner[index] = new
    else:
        setattr(owner, name, new)
    return True


def other_value(value: Any) -> Any:
    """An unequal value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float | complex):
        return value + 1 + abs(value)
    if isinstance(value, str):
        return value + "?"
    if value is None:
        return 0
    if isinstance(value, dict):
        return {**value, "?": 0}
    if isinstance(value, set):
        return {*value, "?"}
    kind = type(value)
    return kind([*value[:-1], other_value(value[-1])]) if value else kind([0])


# -- function calls ----------------------------------------------------------------------------------------------------


def gold_arguments(acceptable: Mapping[str, Sequence[Any]], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that the ground truth accepts: the first value of each; omitted if only the omission is acceptable."""
    chosen: dict[str, Any] = {}
    for name, values in acceptable.items():
        real = [value for value in values if value != ""]
        described = name in schema["properties"]
        if real and (described or "" not in values):
            chosen[name] = _first(real[0])
        elif values and name in schema["required"]:
            chosen[name] = ""
    return chosen


def _first(value: Any) -> Any:
    """Dictionaries list acceptable values for each key."""
    if isinstance(value, dict):
        return {k: real[0] for k, values in value.items() if (real := [one for one in values if one != ""])}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_first(one) for one in value]
    return value


def wrong_calls(
    calls: Sequence[tuple[str, dict[str, Any]]], schema: Mapping[str, Any], acceptable: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """(kind, calls): the first call with another name, an unknown parameter, a missing one, another value of each type;
    one call more, and one less."""
    (name, arguments), rest = calls[0], list(calls[1:])
    yield "name", [(name + "_x", arguments), *rest]
    yield "unknown parameter", [(name, {**arguments, "no_such_parameter": 1}), *rest]
    for key in schema["required"]:
        if key in arguments:
            yield "missing parameter", [(name, {k: v for k, v in arguments.items() if k != key}), *rest]
    for key, value in arguments.items():
        wrong = _other_argument(value)
        if wrong not in acceptable[key]:
            yield "value", [(name, {**arguments, key: wrong}), *rest]
        if isinstance(value, int | float) and not isinstance(value, bool) and str(value) not in acceptable[key]:
            yield "type", [(name, {**arguments, key: str(value)}), *rest]
    yield "one more", [*calls, calls[0]]
    yield "one less", rest


def _other_argument(value: Any) -> Any:
    """Another value. Strings get letters, because punctuation is ignored in comparisons."""
    if isinstance(value, str):
        return value + "qqq"
    if isinstance(value, dict) and value:
        key = next(iter(value))
        return {**value, key: _other_argument(value[key])}
    if isinstance(value, list) and value:
        return [*value[:-1], _other_argument(value[-1])]
    return other_value(value)
