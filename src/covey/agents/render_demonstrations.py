"""Renders demonstrations like sampled episodes: tools, calls and results have the same form.

If the chat template renders tools and calls, they are passed to it. Otherwise the tools are explained in the system
message, calls are written into the reply's text in the agent's format, and the format turns results into messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.agents.formats.base import call_id, tool_calls_message, with_pictures
from covey.errors import InputError
from covey.images import images_of, text_of
from covey.replies import with_system
from covey.tool_calls import Call, Format, Schemas
from covey.types import Messages

Message = dict[str, Any]


def render_messages(messages: Messages, schemas: Schemas, format: Format) -> tuple[Messages, Schemas | None]:
    """The messages and tools for the chat template. `messages` have tool calls in OpenAI's form."""
    rendered = _render_conversation(messages, format)
    if format.native_tools:
        return rendered, schemas or None
    return tuple(with_system(rendered, format.instructions(schemas))), None


def _render_conversation(messages: Messages, format: Format) -> tuple[Message, ...]:
    rendered: list[Message] = []
    pending: list[Call] = []  # calls of the last reply without a result
    by_id: dict[str, Call] = {}  # the same calls by the demonstration's own ids
    results: list[tuple[Call, str]] = []
    pictures: list[list[Any]] = []  # of the results
    for message in messages:
        if message["role"] == "tool" and pending:
            call = by_id.get(str(message.get("tool_call_id"))) or pending[0]
            if call not in pending:
                raise InputError(f"two results of the call {message['tool_call_id']!r:.80}: remove one of them")
            pending.remove(call)
            pictures.append(images_of([message]))
            results.append((call, text_of(message["content"])))
            continue
        rendered += with_pictures(format.observe(results), pictures)
        results, pictures = [], []
        if message["role"] == "assistant":
            pending, by_id = _read_calls(message, len(rendered), format)
            rendered.append(_render_reply(message, pending, format) if message.get("tool_calls") else dict(message))
        else:
            rendered.append(dict(message))
    return (*rendered, *with_pictures(format.observe(results), pictures))


def _read_calls(message: Mapping[str, Any], place: int, format: Format) -> tuple[list[Call], dict[str, Call]]:
    """The calls of a reply, from its `tool_calls` or from its text. They get new ids, since some templates demand a
    certain form."""
    if not message.get("tool_calls"):
        return list(format.parse(str(message["content"])).calls), {}
    calls: list[Call] = []
    by_id: dict[str, Call] = {}
    for number, entry in enumerate(message["tool_calls"]):
        function = entry["function"]
        new_id = call_id(f"{function['name']} {number}", place)
        calls.append(Call(function["name"], function["arguments"], new_id))
        if "id" in entry:
            by_id[str(entry["id"])] = calls[-1]
    return calls, by_id


def _render_reply(message: Mapping[str, Any], calls: Sequence[Call], format: Format) -> Message:
    """A reply with tool calls, for the template or as text."""
    content = str(message["content"])
    if format.native_tools:
        return {**message, "content": content, "tool_calls": tool_calls_message(calls)}
    text = "\n".join(part for part in (content, call_text(format, calls)) if part)
    parsed = [(call.name, dict(call.arguments)) for call in format.parse(text).calls if call.problem is None]
    if parsed != [(call.name, dict(call.arguments)) for call in calls]:
        raise InputError(
            f"this reply cannot be written in the format {format.name} so that it is read as the same calls:\n{text}"
        )
    return {key: value for key, value in message.items() if key in ("role", "weight")} | {"content": text}


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
