"""Demonstrations as an episode would have had them: tools explained, calls written and results shown as in sampling.

Where the chat template shows tools and calls by itself, they are left to it. Where it does not, the tools are explained
in the system message, a call is written into the reply's text in the agent's format, and a result comes as the message
that the format makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.agents.formats import Format
from covey.agents.formats.base import Call, Schemas, call_id
from covey.agents.turns import with_system
from covey.errors import InputError
from covey.types import Messages

Message = dict[str, Any]


def written(messages: Messages, schemas: Schemas, format: Format) -> tuple[Messages, Schemas | None]:
    """The messages and tools that the chat template is given. `messages` have tool calls in OpenAI's form."""
    said = _conversation(messages, format)
    if format.native_tools:
        return said, schemas or None
    return tuple(with_system(said, format.instructions(schemas))), None


def _conversation(messages: Messages, format: Format) -> tuple[Message, ...]:
    found: list[Message] = []
    calls: list[Call] = []  # of the last reply, still without a result
    names: dict[str, Call] = {}  # the same by the ids that the demonstration gave them
    results: list[tuple[Call, str]] = []
    for message in messages:
        if message["role"] == "tool" and calls:
            call = names.get(str(message.get("tool_call_id"))) or calls[0]
            calls.remove(call)
            results.append((call, str(message["content"])))
            continue
        found += format.observe(results)
        results = []
        if message["role"] == "assistant":
            calls, names = _calls(message, len(found), format)
            found.append(_reply(message, calls, format) if message.get("tool_calls") else dict(message))
        else:
            found.append(dict(message))
    return (*found, *format.observe(results))


def _calls(message: Mapping[str, Any], place: int, format: Format) -> tuple[list[Call], dict[str, Call]]:
    """The calls of a reply: listed, or written into its text. Ids are made anew, since some templates are strict."""
    if not message.get("tool_calls"):
        return list(format.parse(str(message["content"])).calls), {}
    calls: list[Call] = []
    names: dict[str, Call] = {}
    for number, given in enumerate(message["tool_calls"]):
        function = given["function"]
        ident = call_id(f"{function['name']} {number}", place)
        calls.append(Call(function["name"], function["arguments"], ident))
        if "id" in given:
            names[str(given["id"])] = calls[-1]
    return calls, names


def _reply(message: Mapping[str, Any], calls: Sequence[Call], format: Format) -> Message:
    """A reply that calls tools, for the template, or as text."""
    content = str(message["content"])
    if format.native_tools:
        listed = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in calls
        ]
        return {**message, "content": content, "tool_calls": listed}
    text = "\n".join(part for part in (content, call_text(format, calls)) if part)
    read = [(call.name, dict(call.arguments)) for call in format.parse(text).calls if call.problem is None]
    if read != [(call.name, dict(call.arguments)) for call in calls]:
        raise InputError(
            f"this reply cannot be written in the format {format.name} so that it is read as the same calls:\n{text}"
        )
    return {"role": "assistant", "content": text}


def call_text(format: Format, calls: Sequence[Call]) -> str:
    """Calls as a model writes them in a format."""
    if format.name not in WRITERS:
        raise InputError(
            f"tool calls of demonstrations cannot be written in the format {format.name}\n"
            f"  use agent.format={' or '.join(WRITERS)}, or write the calls into the assistant's content yourself"
        )
    return WRITERS[format.name](calls)


def _json(call: Call, arguments: str = "arguments") -> str:
    return json.dumps({"name": call.name, arguments: dict(call.arguments)}, ensure_ascii=False)


WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls),
    "llama": lambda calls: "; ".join(_json(call, "parameters") for call in calls),
    "mistral": lambda calls: f"[TOOL_CALLS] [{', '.join(map(_json, calls))}]",
}
