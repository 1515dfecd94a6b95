"""Replies in OpenAI's form, whole or as a stream of chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from covey.gateway.messages import Message
from covey.types import StopReason, Turn

PIECE = 24  # characters of a streamed chunk


@dataclass(frozen=True)
class Choice:
    """One sampled reply. `tokens` are the texts of its ids, one by one."""

    message: Message
    turn: Turn
    tokens: Sequence[str]

    @property
    def finish(self) -> str:
        if self.turn.stop is StopReason.LENGTH:
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"

    def logprobs(self) -> dict[str, Any]:
        """Of the sampled tokens, under the distribution they were drawn from."""
        pairs = zip(self.tokens, self.turn.logprobs, strict=True)
        entries = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in pairs
        ]
        return {"content": entries, "refusal": None}


@dataclass(frozen=True)
class Completed:
    """An answered request."""

    id: str
    model: str
    choices: Sequence[Choice]
    logprobs: bool

    def usage(self) -> dict[str, int]:
        prompt = len(self.choices[0].turn.prompt_ids)
        sampled = sum(len(choice.turn.completion_ids) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {**choice.message, "refusal": None},
                "finish_reason": choice.finish,
                "logprobs": choice.logprobs() if self.logprobs else None,
            }
            for index, choice in enumerate(self.choices)
        ]
        return self._frame("chat.completion") | {"choices": choices, "usage": self.usage()}

    def events(self, *, with_usage: bool) -> Iterator[str]:
        """The same as server-sent events."""
        frame = self._frame("chat.completion.chunk")
        for index, choice in enumerate(self.choices):
            shown = choice.logprobs() if self.logprobs else None
            for delta in _deltas(choice.message):
                yield _event(frame | {"choices": [_part(index, delta, logprobs=shown)]})
                shown = None  # once, with the first chunk: clients join them
            yield _event(frame | {"choices": [_part(index, {}, finish=choice.finish)]})
        if with_usage:
            yield _event(frame | {"choices": [], "usage": self.usage()})
        yield "data: [DONE]\n\n"

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}


def _part(index: int, delta: Message, *, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}


def _deltas(message: Message) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": None if message["content"] is None else ""}
    for piece in _pieces(message["content"] or ""):
        yield {"content": piece}
    for place, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        opening = {"index": place, "id": call["id"], "type": "function"}
        yield {"tool_calls": [opening | {"function": {"name": function["name"], "arguments": ""}}]}
        for piece in _pieces(function["arguments"]):
            yield {"tool_calls": [{"index": place, "function": {"arguments": piece}}]}


def _pieces(text: str) -> Iterator[str]:
    return (text[at : at + PIECE] for at in range(0, len(text), PIECE))


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
