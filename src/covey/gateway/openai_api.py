"""What a client is told when it does not get what it asked for, in OpenAI's form."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from covey.storage import TOO_DEEP, json_problem
from covey.types import Messages, RewardTable, StopReason, Turn

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class Refused(Exception):
    """A request that is answered with an error. `code` is for programs, the text for people."""

    def __init__(self, status: int, text: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.text, "type": kind, "param": self.param, "code": self.code}}


def wrong(param: str, text: str) -> Refused:
    return Refused(400, f"{param}: {text}", param=param)


# -- The JSON of a request. What JSON can say, but nothing after it can take, is refused here with a reason ------------


def read_body(raw: bytes | bytearray) -> dict[str, Any]:
    try:
        body = json.loads(raw or b"{}")
        reason = json_problem(body)
    except RecursionError:
        reason = TOO_DEEP
    except ValueError as error:  # also what is not UTF-8, and numbers of thousands of digits
        raise Refused(400, f"not JSON: {error!s:.200}") from error
    if reason is not None:
        raise Refused(400, f"not JSON that is read here: {reason}")
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    return body


# -- Messages as clients write them ↔ as chat templates and tool-call formats want them --------------------------------
# OpenAI's clients send a call's arguments as JSON in a string, and echo replies with keys of their own; templates want
# the arguments themselves, and formats decide how a call and its result are written among the messages. A reply that a
# client echoes is recognised, so that the conversation goes on from the tokens that were sampled.

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
    return found if isinstance(found, dict) and json_problem(found) is None else raw  # a template shows it


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


# -- A chat request, read and checked. Unknown fields are tolerated; known ones that cannot be followed are refused ----

MAX_CHOICES = 128
MAX_STOPS, LONGEST_STOP = 64, 1000  # strings, characters: each is looked for after every token
MAX_REWARDS, LONGEST_NAME = 64, 100  # names, characters: each is a metric of the run
LARGEST_REWARD = sys.float_info.max  # a whole number may be beyond it


@dataclass(frozen=True)
class Asked:
    """What `/v1/chat/completions` was asked for."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    may_call: bool  # False: the tools are shown, and calls are not read (tool_choice: none)
    n: int
    stop: tuple[str, ...]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    logprobs: bool
    stream: bool
    with_usage: bool  # of a stream, at its end


def read_request(body: Mapping[str, Any]) -> Asked:
    _refuse_what_changes_sampling(body)
    tools = _tools(body.get("tools"))
    limit = body.get("max_completion_tokens")
    limit = body.get("max_tokens") if limit is None else limit
    options = body.get("stream_options")
    return Asked(
        messages=read_messages(body.get("messages")),
        tools=tools,
        may_call=_may_call(body.get("tool_choice"), bool(tools)),
        n=_whole(body, "n", 1, most=MAX_CHOICES) or 1,
        stop=_stop(body.get("stop")),
        max_tokens=_whole({"max_tokens": limit}, "max_tokens", 1),
        temperature=_number(body, "temperature", 0.0, 100.0),
        top_p=_number(body, "top_p", 1e-6, 1.0),
        logprobs=_logprobs(body),
        stream=body.get("stream") is True,
        with_usage=isinstance(options, Mapping) and options.get("include_usage") is True,
    )


def _refuse_what_changes_sampling(body: Mapping[str, Any]) -> None:
    """Tokens must come from the model's own distribution: nothing here bends it."""
    for name in ("presence_penalty", "frequency_penalty", "logit_bias", "functions", "function_call"):
        if body.get(name):
            raise wrong(name, "is not supported; leave it out")
    form = body.get("response_format")
    if form is not None and not (isinstance(form, Mapping) and form.get("type") == "text"):
        raise wrong("response_format", "only text is supported: replies are sampled as the model writes them")


def _tools(raw: Any) -> tuple[Mapping[str, Any], ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise wrong("tools", "must be a list")
    for tool in raw:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise wrong("tools", 'each must be {"type": "function", "function": {"name": ..., "parameters": ...}}')
    return tuple(raw)


def _may_call(choice: Any, tools: bool) -> bool:
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return False
    raise wrong("tool_choice", "only auto and none are supported: a forced call is not what the model would sample")


def _stop(raw: Any) -> tuple[str, ...]:
    stop = [] if raw is None else [raw] if isinstance(raw, str) else raw
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise wrong("stop", "must be a string or a list of strings")
    if len(stop) > MAX_STOPS or any(len(text) > LONGEST_STOP for text in stop):
        raise wrong("stop", f"at most {MAX_STOPS} strings of {LONGEST_STOP} characters, got {len(stop)} strings")
    return tuple(stop)


def _logprobs(body: Mapping[str, Any]) -> bool:
    if body.get("top_logprobs"):
        raise wrong("top_logprobs", "only 0 is supported: log-probs are those of the sampled tokens")
    return body.get("logprobs") is True


def _whole(body: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bound = f" to {most}" if most is not None else ""
        raise wrong(name, f"must be a whole number from {least}{bound}, got {value!r:.40}")
    return value


def _number(body: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise wrong(name, f"must be a number from {least:g} to {most:g}, got {value!r:.40}")
    return float(value)


def read_rewards(body: Mapping[str, Any]) -> RewardTable:
    """`{"reward": 1.0}`, `{"rewards": {"name": 1.0}}`, or both."""
    named = body.get("rewards")
    if named is not None and not isinstance(named, Mapping):
        raise wrong("rewards", 'must be an object: {"name": 1.0}')
    table = {**(named or {}), **({"reward": body["reward"]} if "reward" in body else {})}
    if not table:
        raise Refused(400, 'give {"reward": 1.0} or {"rewards": {"name": 1.0}}', param="reward")
    if len(table) > MAX_REWARDS or not all(0 < len(name) <= LONGEST_NAME for name in table):
        raise wrong("rewards", f"at most {MAX_REWARDS} names of 1 to {LONGEST_NAME} characters, got {len(table)} names")
    for name, value in table.items():
        if not isinstance(value, int | float) or not abs(value) <= LARGEST_REWARD:
            raise wrong(name[:40], f"a reward must be a finite number, got {value!r:.40}")
    return {name: float(value) for name, value in table.items()}


# -- Replies in OpenAI's form, whole or as a stream of chunks ----------------------------------------------------------

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
