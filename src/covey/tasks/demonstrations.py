"""Demonstrations: conversations whose assistant turns SFT imitates, from files or generated.

Columns of a data file:

    messages                         the whole conversation: {role, content}, with tool_calls where tools are called
    question | prompt                or the question, a string (or messages)
    answer | response | completion   and the reply, a string (or messages)
    image | images                   pictures, at the markers <image> of the user's texts, or before the first one
    tools                            schemas of the tools that may be called; default: those of agent.tools
    data_id                          the name in messages; default `FILE:ROW` (from 0)

Replies in a question, and those with `"weight": 0` as in OpenAI's format, are context that is not trained on.

Tool calls and schemas have OpenAI's form, with or without the `function` around them; arguments and schemas may also be
JSON in a string, as Parquet and CSV files store free-form values:

    {"role": "assistant", "tool_calls": [{"function": {"name": "calculator", "arguments": {"expression": "1+1"}}}]}
    {"type": "function", "function": {"name": "calculator", "description": "...", "parameters": {...}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.config.schema import DataConfig
from covey.errors import InputError
from covey.images import has_images
from covey.tasks.datasets import DATASETS
from covey.tasks.files import find_files, prepend_system, read_images, read_messages, read_splits, rows_of
from covey.tasks.generated import generate_demonstrations
from covey.tasks.reading import Row, Table, kind, names, read_json
from covey.types import Demonstration

CALL_FIX = 'a call looks like {"function": {"name": "calculator", "arguments": {"expression": "1+1"}}}'
TOOL_FIX = 'a tool looks like {"type": "function", "function": {"name": "calculator", "parameters": {...}}}'
QUESTIONS = ("question", "prompt")
REPLIES = ("response", "completion", "answer")
ROW_FIX = (
    'a row looks like {"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}, or has question and answer'
)

GENERATED_TRAIN = 400
GENERATED_VALIDATION = 50


@dataclass(frozen=True)
class DemonstrationSet:
    train: tuple[Demonstration, ...]
    validation: tuple[Demonstration, ...]
    description: str
    tools: tuple[str, ...] = ()  # by name; used if the demonstrations have no schemas and the user names no tools
    warnings: tuple[str, ...] = ()


def load_demonstrations(data: DataConfig, seed: int) -> DemonstrationSet:
    """The demonstrations of `data`: from files, or generated."""
    files = data.train_files is not None or data.val_files is not None
    demonstrations = _from_files(data) if files else _generated(data, seed)
    if data.system_prompt is None:
        return demonstrations
    train, validation = (
        prepend_system(part, data.system_prompt) for part in (demonstrations.train, demonstrations.validation)
    )
    return replace(demonstrations, train=train, validation=validation)


def _generated(data: DataConfig, seed: int) -> DemonstrationSet:
    if data.name in DATASETS:
        raise InputError(
            f"data={data.name} has tasks but no demonstrations to imitate\n  give a file: data.train_files=demos.jsonl"
        )
    train, validation, tools = generate_demonstrations(
        data.name,
        data.options,
        seed=seed,
        train_size=data.train_size or GENERATED_TRAIN,
        validation_size=data.val_size or GENERATED_VALIDATION,
    )
    description = f"{data.name}: {len(train)} training and {len(validation)} validation demonstrations, generated"
    return DemonstrationSet(tuple(train), tuple(validation), description, tools)


def _from_files(data: DataConfig) -> DemonstrationSet:
    if data.train_files is None:
        raise InputError("there is nothing to learn from: data.val_files is given without data.train_files")
    warnings: list[str] = []
    train, validation = read_splits(data, read_demonstrations, "demonstrations", warnings)
    trained_on = {repr(d.messages) for d in train}
    if leaked := [d for d in validation if repr(d.messages) in trained_on]:
        warnings.append(f"{len(leaked)} of {len(validation)} validation demonstrations are trained on too")
    where = ", ".join(str(path) for path in find_files("data.train_files", data.train_files))
    extra = f", {len(validation)} for validation" if validation else ""
    return DemonstrationSet(train, validation, f"{where}: {len(train)} demonstrations{extra}", (), tuple(warnings))


def read_demonstrations(setting: str, files: Any) -> list[Demonstration]:
    """The demonstrations of all files that the setting names, in order."""
    return [demonstration_of(table, row, default_id) for table, row, default_id in rows_of(setting, files)]


def demonstration_of(table: Table, row: Row, default_id: str) -> Demonstration:
    values = {name: value for name, value in row.values.items() if value is not None}
    messages = _conversation(table, row, values["messages"]) if "messages" in values else _pair(table, row, values)
    messages = read_images(table, row, messages, values)
    replies = [message for message in messages if message["role"] == "assistant"]
    if not replies:
        raise table.mistake(row, "no message of the assistant: there is nothing to learn from", ROW_FIX)
    if not any(message.get("weight", 1) for message in replies):
        raise table.mistake(row, "every message of the assistant has weight 0: there is nothing to learn from")
    return Demonstration(
        id=str(values.get("data_id", default_id)),
        messages=messages,
        tools=read_tools(table, row, values["tools"]) if "tools" in values else None,
        place=table.place(row),
    )


def _conversation(table: Table, row: Row, value: Any, column: str = "messages") -> tuple[Mapping[str, Any], ...]:
    messages = read_messages(table, row, column, decoded(table, row, column, value))
    result = []
    for index, message in enumerate(messages):
        if (calls := message.get("tool_calls")) is not None:
            where = f"{column}[{index}].tool_calls"
            if message["role"] != "assistant":
                raise table.mistake(row, f"{where}: only the assistant calls tools, not role {message['role']}")
            message = {**message, "tool_calls": read_calls(table, row, where, calls)}
        if (weight := message.get("weight", 1)) not in (0, 1):
            fix = "0 leaves it out of the loss, 1 trains on it"
            raise table.mistake(row, f"{column}[{index}].weight must be 0 or 1, got {weight!r:.80}", fix)
        shown = message["role"] != "assistant" and has_images(message["content"])
        if isinstance(message["content"], list) and not shown:
            message = {**message, "content": _text(table, row, f"{column}[{index}].content", message["content"])}
        result.append(message)
    return tuple(result)


def _text(table: Table, row: Row, where: str, parts: Sequence[Any]) -> str:
    """Join the text parts of a content list."""
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            part_type = part.get("type") if isinstance(part, Mapping) else kind(part)
            raise table.mistake(row, f"{where} has a part that is not text: {part_type}")
    return "".join(part["text"] for part in parts)


def _pair(table: Table, row: Row, values: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """A question and its reply."""
    question = next((name for name in QUESTIONS if name in values), None)
    reply = next((name for name in REPLIES if name in values), None)
    if question is None or reply is None:
        missing = "messages, question or prompt" if question is None else "answer, response or completion"
        raise table.mistake(row, f"no column {missing} (columns here: {names(row.values)})", ROW_FIX)
    return (
        *map(_as_context, _side(table, row, question, values[question], "user")),
        *_side(table, row, reply, values[reply], "assistant"),
    )


def _as_context(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of the question: replies in it are not trained on."""
    return {**message, "weight": 0} if message["role"] == "assistant" else message


def _side(table: Table, row: Row, column: str, value: Any, role: str) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, list):
        return _conversation(table, row, value, column)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise table.mistake(row, f"{column} must be a string or a list of messages, got {kind(value)}", ROW_FIX)
    if not str(value).strip():
        raise table.mistake(row, f"{column} is empty")
    return ({"role": role, "content": str(value)},)


# -- Tool calls and schemas --------------------------------------------------------------------------------------------


def read_calls(table: Table, row: Row, where: str, value: Any) -> list[dict[str, Any]]:
    """The tool calls of a message, with arguments as objects."""
    if not isinstance(value, list):
        raise table.mistake(row, f"{where} must be a list of calls, got {kind(value)}", CALL_FIX)
    return [_call(table, row, f"{where}[{index}]", call) for index, call in enumerate(value)]


def _call(table: Table, row: Row, where: str, call: Any) -> dict[str, Any]:
    function = _function(table, row, where, call, CALL_FIX)
    given = function.get("arguments") or {}
    arguments = decoded(table, row, f"{where}.arguments", given)
    if arguments is given and table.unit == "row":  # a struct of Parquet has the arguments of all other calls as nulls
        arguments = _without_nulls(arguments)
    if not isinstance(arguments, Mapping):
        raise table.mistake(row, f"{where}.arguments must be an object, got {kind(arguments)}", CALL_FIX)
    call_id = {"id": call["id"]} if call.get("id") is not None else {}
    return call_id | {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}


def read_tools(table: Table, row: Row, value: Any) -> tuple[dict[str, Any], ...]:
    """The schemas of a row's `tools` column."""
    value = decoded(table, row, "tools", value)
    if not isinstance(value, list):
        raise table.mistake(row, f"tools must be a list of schemas, got {kind(value)}", TOOL_FIX)
    schemas = []
    for index, tool in enumerate(value):
        where = f"tools[{index}]"
        function = _function(table, row, where, decoded(table, row, where, tool), TOOL_FIX)
        schemas.append({"type": "function", "function": _without_nulls(function)})
    return tuple(schemas)


def decoded(table: Table, row: Row, where: str, value: Any) -> Any:
    """A value, decoded if it is JSON in a string."""
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
    """Parquet gives every object the fields of all others, filled with nulls."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
