"""Mistral: Mistral 7B v0.3, Nemo, Small, Ministral.

    [TOOL_CALLS] [{"name": "search", "arguments": {"query": "covey"}}]
    [TOOL_CALLS]search{"query": "covey"}
    [TOOL_CALLS]search[CALL_ID]a1B2c3D4e[ARGS]{"query": "covey"}

The marks are special tokens, which decoding may have dropped. So a reply counts as calls without them where it is, from
end to end, a JSON list of calls, one call, or `name{…}` (several may follow each other). Accepted besides: `parameters`
for `arguments`, JSON in a string, and what `lenient.py` reads. The template demands ids of nine letters or digits: the
model's own is kept where it wrote one, otherwise it is made from the call and its place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from covey.agents.formats.base import (
    MAX_CALLS,
    Call,
    Parsed,
    Results,
    Schemas,
    as_json,
    assistant,
    call_id,
    is_call,
    joined,
    labelled,
    looks_like_call,
    make_call,
    read_call,
    show,
    still_thinking,
    too_many,
)
from covey.agents.formats.json_repair import Unreadable, read, skip_space, value_end
from covey.replies import speech_start

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
        return INSTRUCTIONS.format(tools=as_json(schemas)) if schemas else None

    def parse(self, text: str) -> Parsed:
        start = speech_start(text)
        if start is None:
            return still_thinking(text) if MARK in text else Parsed(assistant(text))
        found, begin, end = _found(text, start)
        calls = _with_ids([*found[:MAX_CALLS], too_many(text)] if len(found) > MAX_CALLS else found)
        if not self.native_tools or all(call.problem for call in calls):
            return Parsed(assistant(text), calls)
        return Parsed(assistant(joined([text[:begin], text[end:]]), calls), calls)

    def observe(self, results: Results) -> list[dict[str, Any]]:
        return show(results, self.native_tools, labelled)


def _found(text: str, start: int) -> tuple[list[Call], int, int]:
    """The calls of a reply, where they begin and where they end. In a reply that is calls and nothing else, a mark
    stands inside a string."""
    bare, mark = _bare(text[start:].strip()), text.find(MARK, start)
    if mark < 0 or (bare and not any(call.problem for call in bare)):
        return bare, start, len(text)
    calls, end = _calls(text, mark)
    return calls, mark, end


def _calls(text: str, mark: int) -> tuple[list[Call], int]:
    """The calls after a mark, and where they end; text may follow."""
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
        found, end = _one(text, begin)
        calls += found
        if end is None:
            return calls, len(text)
        at = end


def _one(text: str, begin: int) -> tuple[list[Call], int | None]:
    """What stands after one mark: a list of calls, a call, or a name with its arguments."""
    named = NAMED.match(text, begin)
    start = named.end() if named else begin
    end = value_end(text, start)
    body = text[start:end]
    if named:
        return [_named(named, body, begin)], end
    try:
        value = read(body)
    except Unreadable:
        return [read_call(body, begin, HOW)], end
    if not isinstance(value, list) or not value:
        return [read_call(body, begin, HOW)], end
    return [_listed(one, begin + place) for place, one in enumerate(value)], end


def _named(named: re.Match[str], body: str, place: int) -> Call:
    name, ident = named[1], named[2] or call_id(named[0] + body, place)
    try:
        return make_call({"name": name, "arguments": read(body)}, ident, HOW)
    except Unreadable as problem:
        return Call(name, id=ident, problem=f"The arguments of {name} are not valid JSON: {problem}. {HOW}")


def _listed(value: Any, place: int) -> Call:
    given = value.get("id") if isinstance(value, dict) else None
    own = given if isinstance(given, str) and ID.fullmatch(given) else None
    return make_call(value, own or call_id(repr(value), place), HOW)


def _bare(body: str) -> list[Call]:
    """Calls without a mark, if the whole reply is nothing else."""
    if not re.match(r"\[?\s*+\{", body):
        return _bare_names(body)
    try:
        value = read(body)
    except Unreadable:
        return [read_call(body, 0, HOW)] if looks_like_call(body) else []
    listed = value if isinstance(value, list) else [value]
    return [_listed(one, place) for place, one in enumerate(listed)] if all(map(is_call, listed)) else []


def _bare_names(body: str) -> list[Call]:
    """`name{…}name{…}`: every part must be in order, or it is just text."""
    found: list[Call] = []
    at = 0
    while at < len(body) and len(found) <= MAX_CALLS:
        named = NAMED.match(body, at)
        end = value_end(body, named.end()) if named else None
        if named is None or end is None:
            return []
        found.append(_named(named, body[named.end() : end], at))
        at = skip_space(body, end)
    return [] if any(call.problem for call in found) else found


def _with_ids(calls: list[Call]) -> tuple[Call, ...]:
    """Ids that differ: a model may give two calls the same."""
    seen: set[str] = set()
    found = []
    for place, call in enumerate(calls):
        if call.id in seen:
            call = replace(call, id=call_id(f"{call.id} again", place))
        seen.add(call.id)
        found.append(call)
    return tuple(found)
