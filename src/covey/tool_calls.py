"""Tool calls, the interface of a tool-call format, and a memory of the replies that a client sends back.

Agents (`covey.agents.formats`) and the gateway share them: the two packages do not import each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from covey.errors import InputError


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as the model wrote it. `problem` says why it could not be parsed; such a call is not run."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed reply. A reply without calls is the last one; `answer` is the final answer if it is not the content."""

    message: dict[str, Any]  # the assistant's message for the conversation
    calls: tuple[Call, ...] = ()
    answer: str | None = None


Schemas = Sequence[Mapping[str, Any]]
Results = Sequence[tuple[Call, str]]


class Format(Protocol):
    """How a model writes tool calls and is shown their results. A format has no state: one serves all episodes."""

    @property
    def name(self) -> str: ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings."""
        ...

    @property
    def native_tools(self) -> bool:
        """Whether the chat template shows tools, calls and results. Otherwise `instructions` go into the system
        message, calls stay in the text, and results become a user message."""
        ...

    def instructions(self, schemas: Schemas) -> str | None:
        """Text for the system message that explains the tools and how to call them; None without tools."""
        ...

    def parse(self, text: str) -> Parsed:
        """Parse a reply without its end-of-turn token. Never raises: an unreadable call has a `problem`."""
        ...

    def observe(self, results: Results) -> list[dict[str, Any]]:
        """Messages with the results of one reply's calls."""
        ...


class ReplyMemory:
    """The replies of one episode, to recognise them when a client sends them back. So the conversation continues from
    their sampled tokens, whatever the client's form of tool calls and results."""

    def __init__(self, format: Format | None) -> None:
        self.format = format
        self._replies: dict[str, Parsed] = {}

    def add(self, reply: Parsed, sent: Mapping[str, Any]) -> None:
        """`sent` is the message that the client will send back."""
        self._replies[_fingerprint(sent)] = reply

    def find(self, message: Mapping[str, Any]) -> Parsed | None:
        return self._replies.get(_fingerprint(message)) if message["role"] == "assistant" else None

    def to_template(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """A client's messages for the chat template: our own replies as they were sampled, and the results of their
        calls in the model's format."""
        shown: list[Mapping[str, Any]] = []
        rest = list(messages)
        while rest:
            message = rest.pop(0)
            reply = self.find(message)
            if reply is None:
                shown.append(message)
                continue
            shown.append(reply.message)
            results = []
            while reply.calls and rest and rest[0]["role"] == "tool":
                results.append(rest.pop(0))
            if results:
                assert self.format is not None, "a reply has calls only if a format parsed them"
                shown += self.format.observe(_match_results(reply.calls, results))
        return shown


def _fingerprint(message: Mapping[str, Any]) -> str:
    """Equal for a reply and for its copy from a client."""
    return json.dumps([message["content"], message.get("tool_calls") or []], sort_keys=True)


def _match_results(calls: Sequence[Call], results: Sequence[Mapping[str, Any]]) -> list[tuple[Call, str]]:
    """Each call of a reply with its result, in the order of the calls; malformed calls with their problem."""
    texts = {message.get("tool_call_id"): message["content"] for message in results}
    if unknown := set(texts) - {call.id for call in calls}:
        raise InputError(f"no tool call before it has the tool_call_id {unknown.pop()!r:.60}")
    return [(call, call.problem or texts.get(call.id, "")) for call in calls if call.problem or call.id in texts]
