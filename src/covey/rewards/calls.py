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

from covey.replies import unfenced

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
