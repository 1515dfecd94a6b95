"""Tool calls of Mistral 7B v0.3, Nemo, Small and Ministral.

    [TOOL_CALLS] [{"name": "search", "arguments": {"query": "covey"}}]
    [TOOL_CALLS]search{"query": "covey"}
    [TOOL_CALLS]search[CALL_ID]a1B2c3D4e[ARGS]{"query": "covey"}

The marks are special tokens, which decoding may have dropped. So they are optional if the whole reply is a JSON list of
calls, one call, or one or more `name{…}`. Also accepted: `parameters` instead of `arguments`, arguments as a JSON
string, and the JSON deviations of `json_repair.py`. The template demands ids of nine letters or digits: the model's own
id is kept, otherwise one is derived from the call and its place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from covey.agents.formats.base import (
    MAX_CALLS,
    assistant,
    call_id,
    is_call,
    join_text,
    looks_like_call,
    make_call,
    parse_call,
    result_messages,
    schemas_as_json,
    too_many_calls,
    unclosed_thinking,
    with_label,
)
from covey.agents.formats.json_repair import InvalidJson, parse_json, skip_space, value_end
from covey.replies import thinking_end
from covey.tool_calls import Call, Parsed, Results, Schemas

MARK = "[TOOL_CALLS]"
NAMED = re.compile(r"([A-Za-z_][\w.-]{0,127})\s*+(?:\[CALL_ID\]\s*+([A-Za-z0-9]{9})\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
ID = re.compile(r"[A-Za-z0-9]{9}")
HOW = f'Write calls as {MARK} [{{"name": "tool name", "arguments": {{"parameter": "value"}}}}]'
INSTRUCTIONS = """You may call these functions:

{tools}

To call some of them, reply with a JSON list and nothing else:
[TOOL_CALLS] [{{"name": "function name", "arguments": {{"parameter": "value"}}}}]
The results are shown to you. When you need no further call, answer."""


@dataclass(frozen=True, slots=True)
class MistralFormat:
    native_tools: bool = True

    name: ClassVar[str] = "mistral"
    stop: ClassVar[tuple[str, ...]] = ()

    def instructions(self, schemas: Schemas) -> str | None:
        return INSTRUCTIONS.format(tools=schemas_as_json(schemas)) if schemas else None

    def parse(self, text: str) -> Parsed:
        start = thinking_end(text)
        if start is None:
            return unclosed_thinking(text) if MARK in text else Parsed(assistant(text))
        parsed, begin, end = _parse_reply(text, start)
        calls = _with_unique_ids([*parsed[:MAX_CALLS], too_many_calls(text)] if len(parsed) > MAX_CALLS else parsed)
        if not self.native_tools or all(call.problem for call in calls):
            return Parsed(assistant(text), calls)
        return Parsed(assistant(join_text([text[:begin], text[end:]]), calls), calls)

    def observe(self, results: Results) -> list[dict[str, Any]]:
        return result_messages(results, self.native_tools, with_label)


def _parse_reply(text: str, start: int) -> tuple[list[Call], int, int]:
    """The calls of a reply, their beginning and their end. If the whole reply is unmarked calls, a mark in it is part
    of a string."""
    unmarked, mark = _unmarked_calls(text[start:].strip()), text.find(MARK, start)
    if mark < 0 or (unmarked and not any(call.problem for call in unmarked)):
        return unmarked, start, len(text)
    calls, end = _marked_calls(text, mark)
    return calls, mark, end


def _marked_calls(text: str, mark: int) -> tuple[list[Call], int]:
    """The calls after a mark, and their end; text may follow."""
    calls: list[Call] = []
    at = mark
    while True:
        begin, marked = skip_space(text, at), False
        while text.startswith(MARK, begin):
            begin, marked = skip_space(text, begin + len(MARK)), True
        if not marked and not NAMED.match(text, begin):
            return calls, at
        if len(calls) > MAX_CALLS:
            return calls, len(text)
        segment, end = _parse_segment(text, begin)
        calls += segment
        if end is None:
            return calls, len(text)
        at = end


def _parse_segment(text: str, begin: int) -> tuple[list[Call], int | None]:
    """The calls after one mark: a list of calls, a call, or a name with its arguments."""
    named = NAMED.match(text, begin)
    start = named.end() if named else begin
    end = value_end(text, start)
    body = text[start:end]
    if named:
        return [_named_call(named, body, begin)], end
    try:
        value = parse_json(body)
    except InvalidJson:
        return [parse_call(body, begin, HOW)], end
    if not isinstance(value, list) or not value:
        return [parse_call(body, begin, HOW)], end
    return [_listed_call(one, begin + place) for place, one in enumerate(value)], end


def _named_call(named: re.Match[str], body: str, place: int) -> Call:
    name, ident = named[1], named[2] or call_id(named[0] + body, place)
    try:
        return make_call({"name": name, "arguments": parse_json(body)}, ident, HOW)
    except InvalidJson as problem:
        return Call(name, id=ident, problem=f"The arguments of {name} are not valid JSON: {problem}. {HOW}")


def _listed_call(value: Any, place: int) -> Call:
    own_id = value.get("id") if isinstance(value, dict) else None
    valid_id = own_id if isinstance(own_id, str) and ID.fullmatch(own_id) else None
    return make_call(value, valid_id or call_id(repr(value), place), HOW)


def _unmarked_calls(body: str) -> list[Call]:
    """Calls without a mark, if they are the whole reply."""
    if not re.match(r"\[?\s*+\{", body):
        return _unmarked_named_calls(body)
    try:
        value = parse_json(body)
    except InvalidJson:
        return [parse_call(body, 0, HOW)] if looks_like_call(body) else []
    listed = value if isinstance(value, list) else [value]
    return [_listed_call(one, place) for place, one in enumerate(listed)] if all(map(is_call, listed)) else []


def _unmarked_named_calls(body: str) -> list[Call]:
    """`name{…}name{…}`: if any part is malformed, all of it is just text."""
    calls: list[Call] = []
    at = 0
    while at < len(body) and len(calls) <= MAX_CALLS:
        named = NAMED.match(body, at)
        end = value_end(body, named.end()) if named else None
        if named is None or end is None:
            return []
        calls.append(_named_call(named, body[named.end() : end], at))
        at = skip_space(body, end)
    return [] if any(call.problem for call in calls) else calls


def _with_unique_ids(calls: list[Call]) -> tuple[Call, ...]:
    """The calls with unique ids: a model may give two calls the same."""
    seen: set[str] = set()
    unique = []
    for place, call in enumerate(calls):
        if call.id in seen:
            call = replace(call, id=call_id(f"{call.id} again", place))
        seen.add(call.id)
        unique.append(call)
    return tuple(unique)
