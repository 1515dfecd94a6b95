"""Tool calls of Llama 3.1, 3.2 and 3.3.

    {"name": "search", "parameters": {"query": "covey"}}

The call is the whole reply. `<|python_tag|>` may come before it, and text before that. Several calls are separated by
`;` or white space. The other form is `<function=search>{"query": "covey"}</function>`, with text around it. Also
accepted: `arguments` instead of `parameters`, arguments as a JSON string, and the JSON deviations of `json_repair.py`.
An object without both `name` and `parameters` is an answer in JSON, not a call. Malformed: text after a call, truncated
JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from covey.agents.formats.base import (
    MAX_CALLS,
    assistant,
    call_id,
    is_call,
    join_text,
    looks_like_call,
    make_call,
    malformed,
    parse_call,
    result_messages,
    schemas_as_json,
    tagged_calls,
    too_many_calls,
    unclosed_thinking,
    with_label,
)
from covey.agents.formats.json_repair import InvalidJson, parse_json, skip_space, value_end
from covey.replies import thinking_end
from covey.tool_calls import Call, Parsed, Results, Schemas

TAG = "<|python_tag|>"
OPEN, CLOSE = "<function=", "</function>"
FUNCTION = re.compile(r"<function=([^<>\n]{1,128})>")
HOW = 'Write a call as {"name": "tool name", "parameters": {"parameter": "value"}} and nothing else.'
TAGGED_HOW = 'Write a call as <function=tool name>{"parameter": "value"}</function>'
INSTRUCTIONS = """You may call one of these functions:

{tools}

To call one, reply with a JSON object and nothing else:
{{"name": "function name", "parameters": {{"parameter": "value"}}}}
Its result is shown to you. When you need no further call, answer."""


@dataclass(frozen=True, slots=True)
class LlamaFormat:
    native_tools: bool = True

    name: ClassVar[str] = "llama"
    stop: ClassVar[tuple[str, ...]] = ()

    def instructions(self, schemas: Schemas) -> str | None:
        return INSTRUCTIONS.format(tools=schemas_as_json(schemas)) if schemas else None

    def parse(self, text: str) -> Parsed:
        start = thinking_end(text)
        if start is None:
            return unclosed_thinking(text) if TAG in text or OPEN in text else Parsed(assistant(text))
        pieces, calls = _calls(text, start)
        # The template shows at most one call per reply: several are kept as the text that the model wrote.
        if not self.native_tools or len(calls) != 1 or calls[0].problem:
            return Parsed(assistant(text), calls)
        return Parsed(assistant(join_text(pieces), calls), calls)

    def observe(self, results: Results) -> list[dict[str, Any]]:
        return result_messages(results, self.native_tools, with_label)


def _calls(text: str, start: int) -> tuple[list[str], tuple[Call, ...]]:
    """The text around the calls, and the calls. The first mark decides; others may be part of its strings."""
    body = text[start:].strip()
    if body.startswith("{") and _means_call(body):
        return [text[:start]], _objects(body)
    tag, function = text.find(TAG, start), FUNCTION.search(text, start)
    if tag >= 0 and (function is None or tag < function.start()):
        return [text[:tag]], _objects(text[tag + len(TAG) :].strip())
    pieces, calls = tagged_calls(text, start, FUNCTION, CLOSE, TAGGED_HOW, _tagged_call)
    return pieces, tuple(calls)


def _means_call(body: str) -> bool:
    """Whether JSON at the beginning of a reply is a call rather than an answer."""
    end = value_end(body, 0)
    try:
        return is_call(parse_json(body[:end])) if end is not None else looks_like_call(body)
    except InvalidJson:
        return looks_like_call(body[:end])


def _objects(body: str) -> tuple[Call, ...]:
    calls: list[Call] = []
    at = 0
    while at < len(body) or not calls:
        if len(calls) == MAX_CALLS:
            return (*calls, too_many_calls(body))
        end = value_end(body, at)
        if end is None and calls:
            # The text after a call is usually a made-up result: no call of such a reply is run.
            return (malformed(body, at, f"Something follows the tool call. {HOW}"),)
        calls.append(parse_call(body[at:end], at, HOW))
        if end is None:
            break
        at = skip_space(body, end)
        if body.startswith(";", at):
            at = skip_space(body, at + 1)
    return tuple(calls)


def _tagged_call(mark: re.Match[str], body: str) -> Call:
    name, ident = mark[1], call_id(mark[1] + body, mark.start())
    try:
        arguments = parse_json(body) if body.strip() else {}
    except InvalidJson as problem:
        return Call(name, id=ident, problem=f"The arguments of {name} are not valid JSON: {problem}. {TAGGED_HOW}")
    return make_call({"name": name, "arguments": arguments}, ident, TAGGED_HOW)
