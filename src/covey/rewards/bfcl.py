"""Function calls as models write them, read without running anything.

    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>      one block or several, a line for each call
    [{"name": "f", "arguments": {"a": 1}}]                           JSON; `parameters` will do for `arguments`
    [f(a=1), module.g()]                                             Python, arguments by name

The whole reply must be calls, but for a <think>…</think> before them and a code fence around them; <tool_call> blocks
may have text around them. In Python's form a bare name and an expression that is no literal stand for their own text.
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
from covey.rewards.function import reward
from covey.rewards.tool_call import made_calls
from covey.types import Episode, Task

Call = tuple[str, Mapping[str, Any]]

LONGEST = 50_000  # characters that are read; nobody's calls are longer
OPEN, CLOSE = "<tool_call>", "</tool_call>"


class NotCalls(ValueError):
    """It was meant to be a call and cannot be read as one."""


def calls_in(reply: str) -> list[Call]:
    """The calls that a reply makes; none where it is prose. NotCalls: a <tool_call> that is no call."""
    text = reply.rpartition("</think>")[2].strip()
    if OPEN in text:
        return _in_blocks(text)
    if len(text) > LONGEST:
        return []
    if (inside := unfenced(text)) is not None:
        text = inside.strip()
    try:
        return read_json(text)
    except NotCalls:
        return _python(text)


def _in_blocks(text: str) -> list[Call]:
    parts = [part.partition(CLOSE) for part in text.split(OPEN)[1:]]
    if len(text) > LONGEST or not all(end and block.strip() for block, end, _ in parts):
        raise NotCalls("a <tool_call> that is empty, without its end, or endless")
    return [call for block, _, _ in parts for call in read_json(block)]


def read_json(text: str) -> list[Call]:
    """One call, a list of them, or one on each line."""
    try:
        try:
            found = json.loads(text)
        except ValueError:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise NotCalls(f"not JSON: {text[:50]!r}") from error
    return [_call(one) for one in (found if isinstance(found, list) else [found])]


def _call(written: Any) -> Call:
    if not isinstance(written, Mapping) or not isinstance(written.get("name"), str):
        raise NotCalls(f"a call needs a name: {written!r:.50}")
    arguments = written.get("arguments", written.get("parameters")) or {}
    if not isinstance(arguments, Mapping):
        raise NotCalls(f"the arguments of a call are an object: {arguments!r:.50}")
    return written["name"], arguments


def _python(text: str) -> list[Call]:
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # `1and` is worth no line on a console
            body = ast.parse(text, mode="eval").body
        nodes: Sequence[ast.expr] = body.elts if isinstance(body, ast.List | ast.Tuple) else [body]
        return [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # a list as a key; nested too deeply
        return []


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise ValueError("not a call with arguments by name")
    name = ast.unparse(node.func)
    if not re.fullmatch(r"[\w.]+", name):
        raise ValueError("not the name of a function")
    return name, {str(word.arg): _value(word.value) for word in node.keywords}


def _value(node: ast.expr) -> Any:
    """Literals as they are; anything else is its own text, and is never computed."""
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_value(item) for item in node.elts)
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_value(key): _value(item) for key, item in zip(node.keys, node.values, strict=True) if key is not None}
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


# -- The reward for calling the right functions, as the Berkeley leaderboard matches their syntax trees ----------------
# Patil et al. 2025, https://proceedings.mlr.press/v267/patil25a.html; categories of Python functions: simple, multiple,
# parallel, parallel_multiple, their `live_` forms, irrelevance and relevance. Those of Java and JavaScript are refused.
#
# A call is right if its function is the expected one, every required parameter is there, none is unknown, and each
# value is among the acceptable ones: of the type that the function's description names (a whole number will do for a
# float, but not inside a list), or else of the type of the first acceptable value. Strings are compared without case,
# spaces and `,./-_*^`, and with one kind of quote. "" among the acceptable values: the parameter may be left out.
#
# Deviations: a <tool_call> that cannot be read earns nothing, neither where a call was wanted nor where none was, and
# neither does an empty reply where none was; true is never 1; an empty list does not pass for a parameter that is left
# out.

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
    wanted = decoded(task.columns["ground_truth"])
    if not wanted:
        raise InputError(f"{task.where}: ground_truth is empty, and category {category} asks for calls")
    for one in wanted:
        for name in one:
            if name not in schemas:
                raise InputError(f"{task.where}: ground_truth calls {name}, which `function` does not describe")


@reward(check=_check)
def bfcl(episode: Episode, final_answer: str, function: Any, category: str, ground_truth: Any = ()) -> dict[str, float]:
    """1 if the calls are those of the ground truth: as many, in any order where there are several. In the categories
    of irrelevance, 1 if the reply says something and calls nothing; in those of relevance, 1 if it makes calls that
    can be read.

    The calls are those of the episode's messages if it made any, else those that the final answer holds.
    Extras: calls, and matched, the share of the expected calls that were made.
    """
    calls = _calls(episode, final_answer)
    if "relevance" in category:
        declined = not calls and bool(final_answer.rpartition("</think>")[2].strip())
        called = bool(calls) and all(name for name, _ in calls)
        right = declined if "irrelevance" in category else called
        return {"reward": float(right), "calls": len(calls), "matched": 0.0}
    wanted, schemas = decoded(ground_truth), _schemas(decoded(function))
    matched = _matched(calls, wanted, schemas)
    right = matched == len(wanted) == len(calls)
    return {"reward": float(right), "calls": len(calls), "matched": matched / len(wanted)}


def _calls(episode: Episode, reply: str) -> list[Call]:
    """The calls. One that cannot be read has no name, and fits nothing."""
    if made := made_calls(episode):
        return [(name, arguments) if isinstance(arguments, Mapping) else ("", {}) for name, arguments in made]
    try:
        return calls_in(reply)
    except NotCalls:
        return [("", {})]


def decoded(column: Any) -> Any:
    """Tables keep free-form columns as JSON text."""
    return json.loads(column) if isinstance(column, str) else column


def _schemas(function: Any) -> dict[str, Mapping[str, Any]]:
    return {one["name"]: one["parameters"] for one in ([function] if isinstance(function, Mapping) else function)}


def _matched(calls: Sequence[Call], wanted: Sequence[Mapping[str, Any]], schemas: Mapping[str, Any]) -> int:
    left, count = list(calls), 0
    for one in wanted:
        ((name, acceptable),) = one.items()
        place = next((i for i, call in enumerate(left) if matches(call, name, acceptable, schemas[name])), None)
        if place is not None:
            del left[place]
            count += 1
    return count


def matches(call: Call, name: str, acceptable: Mapping[str, Sequence[Any]], schema: Mapping[str, Any]) -> bool:
    """Whether a call is the one of the ground truth, whose `acceptable` values are listed by parameter."""
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


def accepts(value: Any, acceptable: Sequence[Any], described: Mapping[str, Any]) -> bool:
    """Whether a value is among the acceptable ones, by the rules of its described type."""
    kind = TYPES[described["type"]]
    if described["type"] == "tuple" and isinstance(value, tuple):
        value = list(value)
    if kind is float and type(value) is int:
        value = float(value)
    real = [one for one in acceptable if not (isinstance(one, str) and one == "")]
    usual = type(real[0]) if real else kind  # what the ground truth holds, where it is not as described
    own: type = type(value)
    if own is not kind and own is not usual:
        return False
    if own is not kind or usual is not kind:
        return any(_equal(value, one) for one in acceptable)
    if kind is str:
        return any(_plain(value) == _plain(one) for one in acceptable if isinstance(one, str))
    if kind is dict:
        return any(_same_dict(value, one) for one in real)
    if kind is list:
        inner = TYPES.get((described.get("items") or {}).get("type", ""), str)
        same = _same_dicts if inner is dict else _same_list
        return any(same(value, one, inner) for one in real)
    return any(_equal(value, one) for one in acceptable)


def _plain(value: Any) -> Any:
    """A string as it is compared; anything else as it is."""
    return IGNORED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value


def _equal(value: Any, one: Any) -> bool:
    return bool(value == one) and isinstance(value, bool) == isinstance(one, bool)


def _same_list(value: list[Any], one: list[Any], inner: type) -> bool:
    """Item by item; each of the described type, or of that of the first acceptable item."""
    usual = type(one[0]) if one else inner
    if len(value) != len(one) or any(type(item) not in (inner, usual) for item in value):
        return False
    return all(_equal(_plain(a), _plain(b)) for a, b in zip(value, one, strict=True))


def _same_dict(value: Mapping[str, Any], one: Mapping[str, Any]) -> bool:
    """Every key has its own acceptable values."""
    if any(key not in one for key in value) or any(key not in value and not _optional(one[key]) for key in one):
        return False
    return all(any(_equal(_plain(value[key]), _plain(fit)) for fit in one[key]) for key in value)


def _same_dicts(value: list[Any], one: list[Any], inner: type) -> bool:
    if len(value) != len(one) or any(type(item) is not inner for item in value):
        return False
    return all(_same_dict(a, b) for a, b in zip(value, one, strict=True))
