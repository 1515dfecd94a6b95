"""Messages as clients write them ↔ as chat templates and tool-call formats want them.

OpenAI's clients send a call's arguments as JSON in a string, and echo replies with keys of their own; templates want
the arguments themselves, and formats decide how a call and its result are written among the messages. A reply that a
client echoes is recognised, so that the conversation goes on from the tokens that were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from covey.gateway.refusal import Refused, wrong
from covey.json_values import flaw
from covey.types import Messages

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


class Call(Protocol):
    """A tool call as the model wrote it; `problem` says what could not be read of it."""

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> Mapping[str, Any]: ...

    @property
    def id(self) -> str: ...

    @property
    def problem(self) -> str | None: ...


class Parsed(Protocol):
    @property
    def message(self) -> Mapping[str, Any]: ...

    @property
    def calls(self) -> Sequence[Call]: ...


class Format(Protocol):
    """How a model writes calls: one of `covey.agents.formats`."""

    @property
    def stop(self) -> Sequence[str]: ...

    @property
    def native_tools(self) -> bool: ...

    def instructions(self, schemas: Any) -> str | None: ...

    def parse(self, text: str) -> Parsed: ...

    def observe(self, results: Any) -> Sequence[Mapping[str, Any]]: ...


@dataclass(frozen=True)
class Said:
    """A reply of the model's: as it stands among messages, and the calls in it."""

    message: Mapping[str, Any]
    calls: Sequence[Call] = ()


def read_messages(raw: Any) -> tuple[Message, ...]:
    if not isinstance(raw, list) or not raw:
        raise wrong("messages", "must be a list with at least one message")
    return tuple(read_message(message, f"messages[{place}]") for place, message in enumerate(raw))


def read_message(raw: Any, where: str = "message") -> Message:
    """A client's message with what is known of it; keys that mean nothing here are left out."""
    if not isinstance(raw, Mapping):
        raise wrong(where, "must be an object with role and content")
    role = raw.get("role")
    if role not in ROLES:
        raise wrong(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {role!r:.40}")
    message: Message = {"role": "system" if role == "developer" else role}
    message["content"] = _content(raw.get("content"), where)
    if role == "assistant" and raw.get("tool_calls"):
        if not isinstance(raw["tool_calls"], list):
            raise wrong(f"{where}.tool_calls", "must be a list of function calls")
        message["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(raw["tool_calls"])
        ]
    return message | {key: raw[key] for key in ("name", "tool_call_id") if isinstance(raw.get(key), str)}


def _content(raw: Any, where: str) -> str:
    if raw is None or isinstance(raw, str):
        return raw or ""
    parts = raw if isinstance(raw, list) else [raw]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise wrong(f"{where}.content", "must be a string, or a list of text parts; images and sounds are not read")
    return "".join(part["text"] for part in parts)


def _call(raw: Any, where: str) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise wrong(where, "must be a function call with a name")
    return {
        "type": "function",
        "id": str(raw.get("id") or ""),
        "function": {"name": function["name"], "arguments": _arguments(function.get("arguments"))},
    }


def _arguments(raw: Any) -> Any:
    """The object that a string holds; what is none stays as it is."""
    if not isinstance(raw, str):
        return raw or {}
    try:
        found = json.loads(raw or "{}")
    except (ValueError, RecursionError):
        return raw
    return found if isinstance(found, dict) and flaw(found) is None else raw  # a template shows it


def outward(said: Said) -> Message:
    """A reply in OpenAI's form."""
    content = str(said.message.get("content") or "")
    calls = [call for call in said.calls if call.problem is None]
    message: Message = {"role": "assistant", "content": content if content or not calls else None}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for call in calls
        ]
    return message


def fingerprint(message: Message) -> str:
    """The same for a reply and for its echo."""
    return json.dumps([message["content"], message.get("tool_calls") or []], sort_keys=True)


class Memory:
    """The replies of one episode, so that their echoes are recognised."""

    def __init__(self, format: Format | None) -> None:
        self.format = format
        self._said: dict[str, Said] = {}

    def keep(self, said: Said) -> None:
        self._said[fingerprint(read_message(outward(said)))] = said

    def inward(self, messages: Sequence[Message]) -> list[Mapping[str, Any]]:
        """A client's messages as the template is to show them."""
        found: list[Mapping[str, Any]] = []
        rest = list(messages)
        while rest:
            message = rest.pop(0)
            said = self._said.get(fingerprint(message)) if message["role"] == "assistant" else None
            if said is None:
                found.append(self._foreign(message))
                continue
            found.append(said.message)
            results = []
            while said.calls and rest and rest[0]["role"] == "tool":
                results.append(rest.pop(0))
            if results:
                assert self.format is not None, "a reply has calls only if a format found them"
                found += self.format.observe(_pairs(said.calls, results))
        return found

    def _foreign(self, message: Message) -> Message:
        """A message that did not come from here."""
        if message.get("tool_calls") and (self.format is None or not self.format.native_tools):
            raise Refused(
                400,
                "messages: there are tool calls that this server did not make, and the model's chat template cannot "
                "show them; echo replies as they were received",
                param="messages",
            )
        return message


def _pairs(calls: Sequence[Call], results: Sequence[Message]) -> list[tuple[Call, str]]:
    """Each call of a reply with its result, in the order of the calls; malformed ones with what is wrong."""
    texts = {message.get("tool_call_id"): message["content"] for message in results}
    unknown = set(texts) - {call.id for call in calls}
    if unknown:
        raise wrong("messages", f"no tool call before it has the tool_call_id {unknown.pop()!r:.60}")
    return [(call, call.problem or texts.get(call.id, "")) for call in calls if call.problem or call.id in texts]


def with_system(messages: Messages, text: str | None) -> list[Mapping[str, Any]]:
    """Messages with a text at the end of their system message."""
    if not text:
        return list(messages)
    first, *rest = messages
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
