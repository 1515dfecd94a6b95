"""A tool call as the model wrote it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from covey.agents.formats.json_repair import Unreadable, read, skip_space, value_end
from covey.replies import SPEAK


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a turn. `problem` says what could not be read of it; then there is nothing to run."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    problem: str | None = None


# -- What a format is, and what formats share: reading calls, writing messages, telling thinking from speech -----------

Schemas = Sequence[Mapping[str, Any]]
Results = Sequence[tuple[Call, str]]

MAX_CALLS = 32  # of one reply; a model that repeats itself does not start a thousand processes
LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
MAX_NAME = 128
ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply, read. No calls: it is the last one, and `answer` is the final answer where that is not the content."""

    message: dict[str, Any]  # role assistant, as it goes on in the conversation
    calls: tuple[Call, ...] = ()
    answer: str | None = None


class Format(Protocol):
    """How a model writes tool calls and is shown their results. It keeps nothing: one serves all episodes."""

    @property
    def name(self) -> str: ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a reply."""
        ...

    @property
    def native_tools(self) -> bool:
        """Whether the chat template shows tools, calls and results by itself. Otherwise `instructions` go into the
        system message, calls stay in the text, and results come as a user's message."""
        ...

    def instructions(self, schemas: Schemas) -> str | None:
        """System text that explains the tools and how to call them; None without tools."""
        ...

    def parse(self, text: str) -> Parsed:
        """A reply without its end-of-turn token. Never raises: what cannot be read is a call with a `problem`."""
        ...

    def observe(self, results: Results) -> list[dict[str, Any]]:
        """Messages that show the results of one reply's calls."""
        ...


# -- calls -----------------------------------------------------------------------------------------------------------


def call_id(text: str, place: int) -> str:
    """Nine letters or digits, as Mistral's template demands: the same for the same call in the same place."""
    number = int.from_bytes(hashlib.sha256(f"{place}\n{text}".encode(errors="replace")).digest()[:8], "big")
    return "".join(LETTERS[number // 62**digit % 62] for digit in range(9))


def read_call(text: str, place: int, how: str) -> Call:
    """A call from its JSON text. `how` shows the model how it is written."""
    try:
        value = read(text)
    except Unreadable as problem:
        return malformed(text, place, f"The tool call is not valid JSON: {problem}. {how}")
    return make_call(value, call_id(text, place), how)


def make_call(value: Any, ident: str, how: str) -> Call:
    """A call from its JSON value: `name`, and `arguments` (or `parameters`) as an object or as JSON in a string."""

    def wrong(problem: str, name: str = "") -> Call:
        return Call(name, id=ident, problem=f"{problem} {how}")

    if not isinstance(value, dict):
        return wrong("A tool call must be a JSON object.")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return wrong('The tool call has no "name".')
    if len(name) > MAX_NAME:
        return wrong(f'The "name" of the tool call is longer than {MAX_NAME} characters.')
    given = [key for key in ARGUMENTS if key in value]
    if len(given) > 1:
        return wrong('The tool call has both "arguments" and "parameters".', name)
    if unknown := set(value) - {"name", *ARGUMENTS, "id", "type"}:
        keys = ", ".join(json.dumps(key[:40], ensure_ascii=False) for key in sorted(unknown)[:4])
        return wrong(f"The tool call has unknown keys: {keys}.", name)
    arguments = value[given[0]] if given else None
    if isinstance(arguments, str):
        try:
            arguments = read(arguments) if arguments.strip() else None
        except Unreadable as problem:
            return wrong(f"The arguments of {name} are not valid JSON: {problem}.", name)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return wrong(f"The arguments of {name} must be a JSON object.", name)
    return Call(name.strip(), arguments, ident)


def is_call(value: Any) -> bool:
    """Whether a JSON value that stands alone is meant as a call, and is not just an answer in JSON."""
    return (
        isinstance(value, dict) and isinstance(value.get("name"), str) and bool({"arguments", "parameters"} & {*value})
    )


def looks_like_call(text: str) -> bool:
    """The same of a text that is not JSON."""
    return bool(re.search(r"""["']name["']""", text) and re.search(r"""["'](?:arguments|parameters)["']""", text))


def tagged(
    text: str,
    start: int,
    opening: re.Pattern[str],
    closing: str,
    how: str,
    read_one: Callable[[re.Match[str], str], Call],
) -> tuple[list[str], list[Call]]:
    """Calls between two marks: the text around them, and the calls. What is malformed counts as text too."""
    calls: list[Call] = []
    pieces: list[str] = []
    at = 0
    while found := opening.search(text, max(at, start)):
        pieces.append(text[at : found.start()])
        if len(calls) == MAX_CALLS:
            call, at = too_many(text), len(text)
        elif inside := _inside(text, found.end(), opening, closing):
            call, at = read_one(found, inside[0]), inside[1]
        else:
            following = opening.search(text, found.end())
            at = following.start() if following else len(text)
            call = malformed(text, found.start(), f"A tool call is not closed: {closing} is missing. {how}")
        calls.append(call)
        if call.problem:
            pieces.append(text[found.start() : at])
    return [*pieces, text[at:]], calls


def _inside(text: str, start: int, opening: re.Pattern[str], closing: str) -> tuple[str, int] | None:
    """What stands between `start` and the closing mark, and where that ends; None if it is not closed before the next
    one opens. Marks inside a JSON string do not count, as long as the JSON is well formed."""
    end = value_end(text, start)
    if end is not None and text.startswith(closing, after := skip_space(text, end)):
        return text[start:end], after + len(closing)
    close = text.find(closing, start)
    if close < 0 or opening.search(text, start, close):
        return None
    return text[start:close], close + len(closing)


def malformed(text: str, place: int, problem: str, name: str = "") -> Call:
    return Call(name, id=call_id(text, place), problem=problem)


def too_many(text: str) -> Call:
    return malformed(text, -1, f"A reply may have {MAX_CALLS} tool calls at most. The others were not run.")


# -- thinking --------------------------------------------------------------------------------------------------------


def still_thinking(text: str) -> Parsed:
    """A reply that calls a tool, or should, and has not stopped thinking."""
    problem = f"Your thinking is not closed. Write {SPEAK} first, then the call or the answer."
    return Parsed(assistant(text), (malformed(text, 0, problem),))


# -- messages --------------------------------------------------------------------------------------------------------


def assistant(content: str, calls: Sequence[Call] = ()) -> dict[str, Any]:
    """The reply as a message. Malformed calls are not among its `tool_calls`: their text stays in the content."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    sound = [call for call in calls if call.problem is None]
    if sound:
        message["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in sound
        ]
    return message


def joined(pieces: Sequence[str]) -> str:
    """Text around calls, without the white space that set them apart."""
    return "\n".join(piece.strip() for piece in pieces if piece.strip())


def show(results: Results, native: bool, wrap: Callable[[Call, str], str]) -> list[dict[str, Any]]:
    """A tool's message for each result. Templates expect one only after a call that they can show: where the template
    knows no tools, or no call was well formed, a user's message says it all."""
    if not results:
        return []
    if native and any(call.problem is None for call, _ in results):
        return [
            {"role": "tool", "name": call.name or "unknown", "tool_call_id": call.id, "content": text}
            for call, text in results
        ]
    return [{"role": "user", "content": "\n".join(wrap(call, text) for call, text in results)}]


def labelled(call: Call, text: str) -> str:
    return f"Result of {call.name}:\n{text}" if call.problem is None else text


# -- tools -----------------------------------------------------------------------------------------------------------


def function_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name, description and parameters of a tool, from OpenAI's form."""
    found: Mapping[str, Any] = schema.get("function", schema)
    return found


def as_json(schemas: Schemas) -> str:
    return "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)


def in_words(schemas: Schemas) -> str:
    """`search(query: string, top_k: integer = 3): what it does`, with a line for each parameter that is described."""
    return "\n".join(_described(function_of(schema)) for schema in schemas)


def _described(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
    properties = {name: about if isinstance(about, Mapping) else {} for name, about in properties.items()}  # or `true`
    shown = ", ".join(_parameter(name, about, name in required) for name, about in properties.items())
    lines = [f"- {function['name']}({shown}): {function.get('description') or ''}".rstrip(": ")]
    lines += [f"    {name}: {about['description']}" for name, about in properties.items() if about.get("description")]
    return "\n".join(lines)


def _parameter(name: str, about: Mapping[str, Any], required: bool) -> str:
    kind = about.get("type", "any")
    if "enum" in about:
        kind = [json.dumps(value, ensure_ascii=False) for value in about["enum"]]
    elif "anyOf" in about:
        kind = [str(member.get("type", "any")) if isinstance(member, Mapping) else "any" for member in about["anyOf"]]
    kind = kind if isinstance(kind, str) else " | ".join(map(str, kind))
    if required:
        return f"{name}: {kind}"
    default = json.dumps(about["default"], ensure_ascii=False) if "default" in about else "optional"
    return f"{name}: {kind} = {default}"
