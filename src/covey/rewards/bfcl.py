"""The `bfcl` reward: function calls matched as the Berkeley Function Calling Leaderboard matches syntax trees.

Patil et al. 2025, https://proceedings.mlr.press/v267/patil25a.html. Categories of Python functions: simple, multiple,
parallel, parallel_multiple, their `live_` forms, irrelevance and relevance. Java and JavaScript are refused.

A call matches if its function is the expected one, every required parameter is present, none is unknown, and each value
is acceptable: it has the type of the function's description (an integer passes as a float, but not inside a list) or
the type of the first acceptable value. Strings are compared without case, spaces and `,./-_*^`, and with one kind of
quote. "" among the acceptable values makes a parameter optional.

Deviations: an unreadable <tool_call> earns nothing in any category, and an empty reply earns nothing in irrelevance;
true is never 1; an empty list does not stand for an omitted parameter.

Calls are parsed from a reply in these forms, and never executed:

    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>      one or several blocks, one call per line
    [{"name": "f", "arguments": {"a": 1}}]                           JSON; `parameters` is read like `arguments`
    [f(a=1), module.g()]                                             Python with keyword arguments

Apart from a leading <think>…</think> and a code fence, the whole reply must be calls; only <tool_call> blocks may have
text around them. In Python's form, an expression that is not a literal is kept as its source text.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from covey.errors import InputError
from covey.replies import unfenced
from covey.rewards.function import inline, reward
from covey.rewards.tool_call import count_matches, made_calls
from covey.types import Episode, Task

Call = tuple[str, Mapping[str, Any]]

UNREADABLE: Call = ("", {})  # a call that cannot be parsed; it matches nothing
MAX_LENGTH = 50_000  # characters that are parsed; no real call is longer
OPEN, CLOSE = "<tool_call>", "</tool_call>"
TYPES: dict[str, type] = {
    **{"string": str, "any": str, "integer": int, "float": float, "number": float, "boolean": bool},
    **{"array": list, "tuple": list, "dict": dict, "object": dict},
}
IGNORED = re.compile(r"[ ,./\-_*^]")


def _check(task: Task) -> None:
    category = str(task.columns["category"])
    if "java" in category:
        raise InputError(f"{task.where}: category {category}: only calls of Python functions can be matched")
    if "relevance" in category:
        return
    schemas = _schemas(decoded(task.columns["function"]))
    expected = decoded(task.columns["ground_truth"])
    if not expected:
        raise InputError(f"{task.where}: ground_truth is empty, but category {category} expects calls")
    for name in (name for one in expected for name in one):
        if name not in schemas:
            raise InputError(f"{task.where}: ground_truth calls {name}, which `function` does not describe")


@inline
@reward(check=_check)
def bfcl(episode: Episode, final_answer: str, function: Any, category: str, ground_truth: Any = ()) -> dict[str, float]:
    """1 if the calls are exactly those of the ground truth, in any order. In irrelevance categories, 1 for a non-empty
    reply without calls; in relevance categories, 1 for calls that can be parsed.

    The calls are those in the episode's messages, or else those in the final answer. Extras: `calls`, and `matched`,
    the share of expected calls that were made.
    """
    calls = _calls(episode, final_answer)
    if "relevance" in category:
        declined = not calls and bool(final_answer.rpartition("</think>")[2].strip())
        called = bool(calls) and all(name for name, _ in calls)
        correct = declined if "irrelevance" in category else called
        return {"reward": float(correct), "calls": len(calls), "matched": 0.0}
    expected, schemas = decoded(ground_truth), _schemas(decoded(function))

    def same(one: Mapping[str, Any], call: Call) -> bool:
        ((name, acceptable),) = one.items()
        return matches(call, name, acceptable, schemas[name])

    matched = count_matches(expected, calls, same)
    correct = matched == len(expected) == len(calls)
    return {"reward": float(correct), "calls": len(calls), "matched": matched / len(expected)}


def _calls(episode: Episode, reply: str) -> list[Call]:
    if made := made_calls(episode):
        return [(name, arguments) if isinstance(arguments, Mapping) else UNREADABLE for name, arguments in made]
    try:
        return parse_calls(reply)
    except CallParseError:
        return [UNREADABLE]


def decoded(column: Any) -> Any:
    """Tables store free-form columns as JSON text."""
    return json.loads(column) if isinstance(column, str) else column


def _schemas(function: Any) -> dict[str, Mapping[str, Any]]:
    return {one["name"]: one["parameters"] for one in ([function] if isinstance(function, Mapping) else function)}


# -- Parsing -----------------------------------------------------------------------------------------------------------


class CallParseError(ValueError):
    """The text looks like a call but cannot be parsed as one."""


def parse_calls(reply: str) -> list[Call]:
    """The calls in a reply; empty for prose. Raises CallParseError for a malformed <tool_call>."""
    text = reply.rpartition("</think>")[2].strip()
    if OPEN in text:
        parts = [part.partition(CLOSE) for part in text.split(OPEN)[1:]]
        if len(text) > MAX_LENGTH or not all(end and block.strip() for block, end, _ in parts):
            raise CallParseError("a <tool_call> is empty, unclosed or too long")
        return [call for block, _, _ in parts for call in _parse_json(block)]
    if len(text) > MAX_LENGTH:
        return []
    if (inside := unfenced(text)) is not None:
        text = inside.strip()
    try:
        return _parse_json(text)
    except CallParseError:
        return _parse_python(text)


def _parse_json(text: str) -> list[Call]:
    """One call, a list of calls, or one call per line."""
    try:
        try:
            value = json.loads(text)
        except ValueError:
            value = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise CallParseError(f"not JSON: {text[:50]!r}") from error
    return [_json_call(one) for one in (value if isinstance(value, list) else [value])]


def _json_call(value: Any) -> Call:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise CallParseError(f"a call needs a name: {value!r:.50}")
    arguments = value.get("arguments", value.get("parameters")) or {}
    if not isinstance(arguments, Mapping):
        raise CallParseError(f"the arguments of a call must be an object: {arguments!r:.50}")
    return value["name"], arguments


def _parse_python(text: str) -> list[Call]:
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # `1and` would print a warning
            body = ast.parse(text, mode="eval").body
        nodes: Sequence[ast.expr] = body.elts if isinstance(body, ast.List | ast.Tuple) else [body]
        return [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # e.g. a list as a key, deep nesting
        return []


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("not a call with keyword arguments")
    name = ast.unparse(node.func)
    if not re.fullmatch(r"[\w.]+", name):
        raise ValueError("not a function name")
    return name, {str(keyword.arg): _python_value(keyword.value) for keyword in node.keywords}


def _python_value(node: ast.expr) -> Any:
    """Literals are evaluated. Any other expression becomes its source text."""
    if isinstance(node, ast.List):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_python_value(item) for item in node.elts)
    if isinstance(node, ast.Dict) and None not in node.keys:
        pairs = zip(node.keys, node.values, strict=True)
        return {_python_value(key): _python_value(item) for key, item in pairs if key is not None}
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


# -- Matching ----------------------------------------------------------------------------------------------------------


def matches(call: Call, name: str, acceptable: Mapping[str, Sequence[Any]], schema: Mapping[str, Any]) -> bool:
    """Whether a call matches an expected one. `acceptable` lists the acceptable values of each parameter."""
    made, arguments = call
    properties = schema.get("properties", {})
    if made != name or any(parameter not in arguments for parameter in schema.get("required", ())):
        return False
    if any(parameter not in properties or parameter not in acceptable for parameter in arguments):
        return False
    if any(parameter not in arguments and not _optional(values) for parameter, values in acceptable.items()):
        return False
    return all(accepts(value, acceptable[key], properties[key]) for key, value in arguments.items())


def _optional(values: Sequence[Any]) -> bool:
    return any(isinstance(value, str) and value == "" for value in values)


def accepts(value: Any, acceptable: Sequence[Any], description: Mapping[str, Any]) -> bool:
    """Whether a value is acceptable for a parameter with this description (its JSON schema)."""
    kind = TYPES[description["type"]]
    if description["type"] == "tuple" and isinstance(value, tuple):
        value = list(value)
    if kind is float and type(value) is int:
        value = float(value)
    values = [one for one in acceptable if not (isinstance(one, str) and one == "")]
    gold_kind = type(values[0]) if values else kind  # the ground truth may deviate from the description
    value_kind: type = type(value)
    if value_kind not in (kind, gold_kind):
        return False
    if value_kind is not kind or gold_kind is not kind:
        return any(_equal(value, one) for one in acceptable)
    if kind is str:
        return any(_normalized(value) == _normalized(one) for one in acceptable if isinstance(one, str))
    if kind is dict:
        return any(_same_dict(value, one) for one in values)
    if kind is list:
        inner = TYPES.get((description.get("items") or {}).get("type", ""), str)
        same = _same_dicts if inner is dict else _same_list
        return any(same(value, one, inner) for one in values)
    return any(_equal(value, one) for one in acceptable)


def _normalized(value: Any) -> Any:
    return IGNORED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value


def _equal(value: Any, one: Any) -> bool:
    return bool(value == one) and isinstance(value, bool) == isinstance(one, bool)


def _same_list(value: list[Any], one: list[Any], inner: type) -> bool:
    """Equal item by item. Items have the described type or that of the first acceptable item."""
    gold_kind = type(one[0]) if one else inner
    if len(value) != len(one) or any(type(item) not in (inner, gold_kind) for item in value):
        return False
    return all(_equal(_normalized(a), _normalized(b)) for a, b in zip(value, one, strict=True))


def _same_dict(value: Mapping[str, Any], one: Mapping[str, Any]) -> bool:
    """Every key has its own list of acceptable values."""
    if any(key not in one for key in value) or any(key not in value and not _optional(one[key]) for key in one):
        return False
    return all(any(_equal(_normalized(value[key]), _normalized(fit)) for fit in one[key]) for key in value)


def _same_dicts(value: list[Any], one: list[Any], inner: type) -> bool:
    if len(value) != len(one) or any(type(item) is not inner for item in value):
        return False
    return all(_same_dict(a, b) for a, b in zip(value, one, strict=True))
