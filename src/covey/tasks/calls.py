"""Tool calls and tool schemas in data files, in OpenAI's form.

{"role": "assistant", "tool_calls": [{"function": {"name": "calculator", "arguments": {"expression": "1+1"}}}]}
{"type": "function", "function": {"name": "calculator", "description": "...", "parameters": {"type": "object", ...}}}

Both are also read without the `function` around them, and arguments and schemas also where they are JSON in a string:
that is how Parquet and CSV files keep what has no fixed columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from covey.tasks.reading import Row, Table, kind, read_json

CALL_FIX = 'a call looks like {"function": {"name": "calculator", "arguments": {"expression": "1+1"}}}'
TOOL_FIX = 'a tool looks like {"type": "function", "function": {"name": "calculator", "parameters": {...}}}'


def read_calls(table: Table, row: Row, where: str, value: Any) -> list[dict[str, Any]]:
    """The tool calls of a message; arguments become objects."""
    if not isinstance(value, list):
        raise table.mistake(row, f"{where} must be a list of calls, got {kind(value)}", CALL_FIX)
    return [_call(table, row, f"{where}[{index}]", call) for index, call in enumerate(value)]


def _call(table: Table, row: Row, where: str, call: Any) -> dict[str, Any]:
    function = _function(table, row, where, call, CALL_FIX)
    arguments = unpacked(table, row, f"{where}.arguments", function.get("arguments") or {})
    if not isinstance(arguments, Mapping):
        raise table.mistake(row, f"{where}.arguments must be an object, got {kind(arguments)}", CALL_FIX)
    named = {"id": call["id"]} if call.get("id") is not None else {}
    return named | {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}


def read_tools(table: Table, row: Row, value: Any) -> tuple[dict[str, Any], ...]:
    """The schemas of a row's `tools` column."""
    value = unpacked(table, row, "tools", value)
    if not isinstance(value, list):
        raise table.mistake(row, f"tools must be a list of schemas, got {kind(value)}", TOOL_FIX)
    found = []
    for index, tool in enumerate(value):
        tool = unpacked(table, row, f"tools[{index}]", tool)
        found.append(
            {"type": "function", "function": _without_nulls(_function(table, row, f"tools[{index}]", tool, TOOL_FIX))}
        )
    return tuple(found)


def unpacked(table: Table, row: Row, where: str, value: Any) -> Any:
    """A value, also where it is JSON in a string."""
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except json.JSONDecodeError as error:
        raise table.mistake(row, f"{where} is not JSON ({error.msg} at character {error.pos})") from error


def _function(table: Table, row: Row, where: str, value: Any, fix: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise table.mistake(row, f"{where} must be an object, got {kind(value)}", fix)
    function = value.get("function") or value
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise table.mistake(row, f"{where} has no name", fix)
    return function


def _without_nulls(value: Any) -> Any:
    """Parquet gives every object the fields of all others, as nulls."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
