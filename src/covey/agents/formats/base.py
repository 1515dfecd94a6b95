"""Helpers for tool-call formats: parsing calls, building messages, describing tools. The interface is `Format`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.agents.formats.json_repair import InvalidJson, parse_json, skip_space, value_end
from covey.replies import THINK_CLOSE
from covey.tool_calls import Call, Parsed, Results, Schemas

MAX_CALLS = 32  # of one reply, so that a model that repeats itself does not start a thousand processes
ID_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
MAX_NAME = 128
ARGUMENTS = ("arguments", "parameters")


# -- Parsing calls -----------------------------------------------------------------------------------------------------


def call_id(text: str, place: int) -> str:
    """Nine letters or digits, as Mistral's template demands. Equal calls in the same place have equal ids."""
    number = int.from_bytes(hashlib.sha256(f"{place}\n{text}".encode(errors="replace")).digest()[:8], "big")
    return "".join(ID_CHARACTERS[number // 62**digit % 62] for digit in range(9))


def parse_call(text: str, place: int, how: str) -> Call:
    """A call from its JSON text. `how` tells the model how to write a call."""
    try:
        value = parse_json(text)
    except InvalidJson as problem:
        return malformed(text, place, f"The tool call is not valid JSON: {problem}. {how}")
    return make_call(value, call_id(text, place), how)


def make_call(value: Any, ident: str, how: str) -> Call:
    """A call from its JSON value: `name`, and `arguments` or `parameters` as an object or a JSON string."""

    def wrong(problem: str, name: str = "") -> Call:
        return Call(name, id=ident, problem=f"{problem} {how}")

    if not isinstance(value, dict):
        return wrong("A tool call must be a JSON object.")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return wrong('The tool call has no "name".')
    if len(name) > MAX_NAME:
        return wrong(f'The "name" of the tool call is longer than {MAX_NAME} characters.')
    keys = [key for key in ARGUMENTS if key in value]
    if len(keys) > 1:
        return wrong('The tool call has both "arguments" and "parameters".', name)
    if unknown := set(value) - {"name", *ARGUMENTS, "id", "type"}:
        shown = ", ".join(json.dumps(key[:40], ensure_ascii=False) for key in sorted(unknown)[:4])
        return wrong(f"The tool call has unknown keys: {shown}.", name)
    arguments = value[keys[0]] if keys else None
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else None
        except InvalidJson as problem:
            return wrong(f"The arguments of {name} are not valid JSON: {problem}.", name)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return wrong(f"The arguments of {name} must be a JSON object.", name)
    return Call(name.strip(), arguments, ident)


def is_call(value: Any) -> bool:
    """Whether a bare JSON value is meant as a call rather than as an answer in JSON."""
    return (
        isinstance(value, dict) and isinstance(value.get("name"), str) and bool({"arguments", "parameters"} & {*value})
    )


def looks_like_call(text: str) -> bool:
    """Whether a text that is not valid JSON is meant as a call."""
    return bool(re.search(r"""["']name["']""", text) and re.search(r"""["'](?:arguments|parameters)["']""", text))


def tagged_calls(
    text: str,
    start: int,
    opening: re.Pattern[str],
    closing: str,
    how: str,
    parse_one: Callable[[re.Match[str], str], Call],
) -> tuple[list[str], list[Call]]:
    """Calls between an opening and a closing tag. Returns the text around them and the calls; the text of malformed
    calls is part of both."""
    calls: list[Call] = []
    pieces: list[str] = []
    at = 0
    while tag := opening.search(text, max(at, start)):
        pieces.append(text[at : tag.start()])
        if len(calls) == MAX_CALLS:
            call, at = too_many_calls(text), len(text)
        elif inside := _inside(text, tag.end(), opening, closing):
            call, at = parse_one(tag, inside[0]), inside[1]
        else:
            following = opening.search(text, tag.end())
            at = following.start() if following else len(text)
            call = malformed(text, tag.start(), f"A tool call is not closed: {closing} is missing. {how}")
        calls.append(call)
        if call.problem:
            pieces.append(text[tag.start() : at])
    return [*pieces, text[at:]], calls


def _inside(text: str, start: int, opening: re.Pattern[str], closing: str) -> tuple[str, int] | None:
    """The text between `start` and the closing tag, and the end of that tag; None if the next tag opens before. Tags
    inside a JSON string are ignored if the JSON is well formed."""
    end = value_end(text, start)
    if end is not None and text.startswith(closing, after := skip_space(text, end)):
        return text[start:end], after + len(closing)
    close = text.find(closing, start)
    if close < 0 or opening.search(text, start, close):
        return None
    return text[start:close], close + len(closing)


def malformed(text: str, place: int, problem: str, name: str = "") -> Call:
    return Call(name, id=call_id(text, place), problem=problem)


def too_many_calls(text: str) -> Call:
    return malformed(text, -1, f"A reply may have {MAX_CALLS} tool calls at most. The others were not run.")


def unclosed_thinking(text: str) -> Parsed:
    """A reply that calls a tool, or should, while its thinking is not closed."""
    problem = f"Your thinking is not closed. Write {THINK_CLOSE} first, then the call or the answer."
    return Parsed(assistant(text), (malformed(text, 0, problem),))


# -- Messages ----------------------------------------------------------------------------------------------------------


def assistant(content: str, calls: Sequence[Call] = ()) -> dict[str, Any]:
    """The reply as a message. Malformed calls are not in `tool_calls`: their text stays in the content."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    valid = [call for call in calls if call.problem is None]
    if valid:
        message["tool_calls"] = tool_calls_message(valid)
    return message


def tool_calls_message(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Calls as the `tool_calls` of a message."""
    return [
        {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}
        for call in calls
    ]


def join_text(pieces: Sequence[str]) -> str:
    """The text around calls, without the white space that separated them."""
    return "\n".join(piece.strip() for piece in pieces if piece.strip())


def result_messages(results: Results, native: bool, wrap: Callable[[Call, str], str]) -> list[dict[str, Any]]:
    """A `tool` message for each result. Templates accept one only after a call that they can render: without native
    tools, or without a well-formed call, one user message has all results."""
    if not results:
        return []
    if native and any(call.problem is None for call, _ in results):
        return [
            {"role": "tool", "name": call.name or "unknown", "tool_call_id": call.id, "content": text}
            for call, text in results
        ]
    return [{"role": "user", "content": "\n".join(wrap(call, text) for call, text in results)}]


def with_pictures(observed: list[dict[str, Any]], pictures: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """The messages of `observe` with the pictures of each result, before the texts."""
    if not any(pictures):
        return observed
    parts = [[{"type": "image", "image": picture} for picture in each] for each in pictures]
    if len(observed) < len(parts):  # one message has all results
        parts = [[part for each in parts for part in each]]
    return [
        {**message, "content": [*images, {"type": "text", "text": message["content"]}]} if images else message
        for message, images in zip(observed, parts, strict=True)
    ]


def with_label(call: Call, text: str) -> str:
    return f"Result of {call.name}:\n{text}" if call.problem is None else text


# -- Tools -------------------------------------------------------------------------------------------------------------


def function_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name, description and parameters of a tool, from OpenAI's form."""
    function: Mapping[str, Any] = schema.get("function", schema)
    return function


def schemas_as_json(schemas: Schemas) -> str:
    return "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)


def describe_tools(schemas: Schemas) -> str:
    """`search(query: string, top_k: integer = 3): what it does`, with a line for each described parameter."""
    return "\n".join(_describe(function_of(schema)) for schema in schemas)


def _describe(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
    # A JSON schema may also be `true`.
    properties = {name: schema if isinstance(schema, Mapping) else {} for name, schema in properties.items()}
    shown = ", ".join(_parameter(name, schema, name in required) for name, schema in properties.items())
    lines = [f"- {function['name']}({shown}): {function.get('description') or ''}".rstrip(": ")]
    lines += [
        f"    {name}: {schema['description']}" for name, schema in properties.items() if schema.get("description")
    ]
    return "\n".join(lines)


def _parameter(name: str, schema: Mapping[str, Any], required: bool) -> str:
    kind = schema.get("type", "any")
    if "enum" in schema:
        kind = [json.dumps(value, ensure_ascii=False) for value in schema["enum"]]
    elif "anyOf" in schema:
        kind = [str(member.get("type", "any")) if isinstance(member, Mapping) else "any" for member in schema["anyOf"]]
    kind = kind if isinstance(kind, str) else " | ".join(map(str, kind))
    if required:
        return f"{name}: {kind}"
    default = json.dumps(schema["default"], ensure_ascii=False) if "default" in schema else "optional"
    return f"{name}: {kind} = {default}"
