"""OpenAI's chat API: requests are read and checked, replies are written whole or as a stream, errors in its form.

Clients send the arguments of a tool call as a JSON string and add keys of their own to the replies that they send back;
chat templates want the arguments as an object, and a tool-call format decides how calls and results are written.
`covey.tool_calls.ReplyMemory` recognises a reply that a client sends back.

Unknown fields of a request are ignored. Known fields that cannot be followed are refused.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.errors import InputError
from covey.images import data_url, has_images, image_of, is_image
from covey.storage import TOO_DEEP, json_problem
from covey.tool_calls import Parsed, ReplyMemory
from covey.types import RewardTable, StopReason, Turn

# -- Errors ------------------------------------------------------------------------------------------------------------

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class RequestRefused(Exception):
    """A request that is answered with an error. `code` is for programs, the text for people."""

    def __init__(self, status: int, text: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.text, "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str, text: str) -> RequestRefused:
    return RequestRefused(400, f"{param}: {text}", param=param)


def read_body(raw: bytes | bytearray) -> dict[str, Any]:
    """The JSON object of a request. JSON that a later stage could not handle is refused with a reason."""
    try:
        body = json.loads(raw or b"{}")
        reason = json_problem(body)
    except RecursionError:
        reason = TOO_DEEP
    except ValueError as error:  # bytes that are not UTF-8, and numbers with thousands of digits, too
        raise RequestRefused(400, f"not JSON: {error!s:.200}") from error
    if reason is not None:
        raise RequestRefused(400, f"not JSON that is read here: {reason}")
    if not isinstance(body, dict):
        raise RequestRefused(400, "the body must be a JSON object")
    return body


# -- Messages ----------------------------------------------------------------------------------------------------------

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(raw: Any) -> tuple[Message, ...]:
    if not isinstance(raw, list) or not raw:
        raise invalid("messages", "must be a list with at least one message")
    return tuple(read_message(message, f"messages[{index}]") for index, message in enumerate(raw))


def read_message(raw: Any, where: str = "message") -> Message:
    """A client's message with its known keys; others are dropped."""
    if not isinstance(raw, Mapping):
        raise invalid(where, "must be an object with role and content")
    role = raw.get("role")
    if role not in ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {role!r:.40}")
    message: Message = {"role": "system" if role == "developer" else role}
    message["content"] = _read_content(raw.get("content"), where, message["role"])
    if role == "assistant" and raw.get("tool_calls"):
        if not isinstance(raw["tool_calls"], list):
            raise invalid(f"{where}.tool_calls", "must be a list of function calls")
        message["tool_calls"] = [
            _read_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(raw["tool_calls"])
        ]
    return message | {key: raw[key] for key in ("name", "tool_call_id") if isinstance(raw.get(key), str)}


def _read_content(raw: Any, where: str, role: str) -> str | list[dict[str, Any]]:
    if raw is None or isinstance(raw, str):
        return raw or ""
    parts = raw if isinstance(raw, list) else [raw]
    if role == "user" and any(map(is_image, parts)):
        return [_read_part(part, f"{where}.content[{index}]") for index, part in enumerate(parts)]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise invalid(
            f"{where}.content", "must be a string, or a list of text parts; users may send images; audio is unsupported"
        )
    return "".join(part["text"] for part in parts)


def _read_part(part: Any, where: str) -> dict[str, Any]:
    """A text, or an image as a data URL. A client may name no other place: it would be read on this machine."""
    if not is_image(part):
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise invalid(where, "must be a text or an image")
        return {"type": "text", "text": part["text"]}
    link = part.get("image_url")
    url = link.get("url") if isinstance(link, Mapping) else link
    if part.get("type") != "image_url" or not isinstance(url, str) or not url.startswith("data:"):
        raise invalid(where, 'an image is {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}')
    try:
        return {"type": "image", "image": image_of(url)}
    except InputError as error:
        raise invalid(where, str(error)) from error


def to_openai_content(content: Any) -> Any:
    """The content of a message with its images as data URLs."""
    if not has_images(content):
        return content
    return [
        {"type": "image_url", "image_url": {"url": data_url(part["image"])}} if is_image(part) else dict(part)
        for part in content
    ]


def _read_call(raw: Any, where: str) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid(where, "must be a function call with a name")
    return {
        "type": "function",
        "id": str(raw.get("id") or ""),
        "function": {"name": function["name"], "arguments": _read_arguments(function.get("arguments"))},
    }


def _read_arguments(raw: Any) -> Any:
    """The object in a JSON string; a string that holds none is kept as it is."""
    if not isinstance(raw, str):
        return raw or {}
    try:
        value = json.loads(raw or "{}")
    except (ValueError, RecursionError):
        return raw
    return value if isinstance(value, dict) and json_problem(value) is None else raw  # a chat template will render it


def to_openai(reply: Parsed) -> Message:
    """A reply as OpenAI's clients expect it."""
    content = str(reply.message.get("content") or "")
    calls = [call for call in reply.calls if call.problem is None]
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


def as_sent_back(reply: Parsed) -> Message:
    """A reply as it is read when the client sends it back."""
    return read_message(to_openai(reply))


def to_template(memory: ReplyMemory, messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """A client's messages for the chat template. Tool calls that were not sampled here must be such that the template
    can show them."""
    can_show_calls = memory.format is not None and memory.format.native_tools
    if not can_show_calls and any(message.get("tool_calls") and memory.find(message) is None for message in messages):
        raise RequestRefused(
            400,
            "messages: there are tool calls that this server did not make, and the model's chat template cannot "
            "show them; echo replies as they were received",
            param="messages",
        )
    try:
        return memory.to_template(messages)
    except InputError as error:
        raise invalid("messages", str(error)) from error


# -- Requests ----------------------------------------------------------------------------------------------------------

MAX_CHOICES = 128
MAX_STOPS, MAX_STOP_LENGTH = 64, 1000  # strings, characters: each is searched for after every token
MAX_REWARDS, MAX_REWARD_NAME = 64, 100  # names, characters: each is a metric of the run
MAX_REWARD = sys.float_info.max  # an integer may be larger


@dataclass(frozen=True)
class ChatRequest:
    """A request to `/v1/chat/completions`."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    may_call: bool  # False: the tools are shown, but calls are not parsed (tool_choice: none)
    n: int
    stop: tuple[str, ...]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    logprobs: bool
    stream: bool
    with_usage: bool  # usage at the end of a stream


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    _refuse_changed_sampling(body)
    tools = _read_tools(body.get("tools"))
    limit = body.get("max_completion_tokens")
    limit = body.get("max_tokens") if limit is None else limit
    options = body.get("stream_options")
    if body.get("top_logprobs"):
        raise invalid("top_logprobs", "only 0 is supported: log-probs are those of the sampled tokens")
    return ChatRequest(
        messages=read_messages(body.get("messages")),
        tools=tools,
        may_call=_read_tool_choice(body.get("tool_choice"), bool(tools)),
        n=_read_integer(body, "n", 1, most=MAX_CHOICES) or 1,
        stop=_read_stop(body.get("stop")),
        max_tokens=_read_integer({"max_tokens": limit}, "max_tokens", 1),
        temperature=_read_number(body, "temperature", 0.0, 100.0),
        top_p=_read_number(body, "top_p", 1e-6, 1.0),
        logprobs=body.get("logprobs") is True,
        stream=body.get("stream") is True,
        with_usage=isinstance(options, Mapping) and options.get("include_usage") is True,
    )


def _refuse_changed_sampling(body: Mapping[str, Any]) -> None:
    """Tokens must be drawn from the model's own distribution."""
    for name in ("presence_penalty", "frequency_penalty", "logit_bias", "functions", "function_call"):
        if body.get(name):
            raise invalid(name, "is not supported; leave it out")
    response_format = body.get("response_format")
    if response_format is not None and not (
        isinstance(response_format, Mapping) and response_format.get("type") == "text"
    ):
        raise invalid("response_format", "only text is supported: replies are sampled as the model writes them")


def _read_tools(raw: Any) -> tuple[Mapping[str, Any], ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise invalid("tools", "must be a list")
    for tool in raw:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise invalid("tools", 'each must be {"type": "function", "function": {"name": ..., "parameters": ...}}')
    return tuple(raw)


def _read_tool_choice(choice: Any, has_tools: bool) -> bool:
    if choice in (None, "auto"):
        return has_tools
    if choice == "none":
        return False
    raise invalid("tool_choice", "only auto and none are supported: a forced call is not what the model would sample")


def _read_stop(raw: Any) -> tuple[str, ...]:
    stop = [] if raw is None else [raw] if isinstance(raw, str) else raw
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise invalid("stop", "must be a string or a list of strings")
    if len(stop) > MAX_STOPS or any(len(text) > MAX_STOP_LENGTH for text in stop):
        raise invalid("stop", f"at most {MAX_STOPS} strings of {MAX_STOP_LENGTH} characters, got {len(stop)} strings")
    return tuple(stop)


def _read_integer(body: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bound = f" to {most}" if most is not None else ""
        raise invalid(name, f"must be a whole number from {least}{bound}, got {value!r:.40}")
    return value


def _read_number(body: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise invalid(name, f"must be a number from {least:g} to {most:g}, got {value!r:.40}")
    return float(value)


def read_rewards(body: Mapping[str, Any]) -> RewardTable:
    """`{"reward": 1.0}`, `{"rewards": {"name": 1.0}}`, or both."""
    named = body.get("rewards")
    if named is not None and not isinstance(named, Mapping):
        raise invalid("rewards", 'must be an object: {"name": 1.0}')
    table = {**(named or {}), **({"reward": body["reward"]} if "reward" in body else {})}
    if not table:
        raise RequestRefused(400, 'give {"reward": 1.0} or {"rewards": {"name": 1.0}}', param="reward")
    if len(table) > MAX_REWARDS or not all(0 < len(name) <= MAX_REWARD_NAME for name in table):
        raise invalid(
            "rewards", f"at most {MAX_REWARDS} names of 1 to {MAX_REWARD_NAME} characters, got {len(table)} names"
        )
    for name, value in table.items():
        if not isinstance(value, int | float) or not abs(value) <= MAX_REWARD:
            raise invalid(name[:40], f"a reward must be a finite number, got {value!r:.40}")
    return {name: float(value) for name, value in table.items()}


# -- Replies -----------------------------------------------------------------------------------------------------------

CHUNK = 24  # characters of a streamed chunk


@dataclass(frozen=True)
class Choice:
    """One sampled reply. `tokens` are the texts of its ids, one by one."""

    message: Message
    turn: Turn
    tokens: Sequence[str]

    @property
    def finish_reason(self) -> str:
        if self.turn.stop is StopReason.LENGTH:
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"

    def logprobs(self) -> dict[str, Any]:
        """Log-probs of the sampled tokens, under the distribution they were drawn from."""
        entries = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(self.tokens, self.turn.logprobs, strict=True)
        ]
        return {"content": entries, "refusal": None}


@dataclass(frozen=True)
class ChatCompletion:
    """The answer to a request."""

    id: str
    model: str
    choices: Sequence[Choice]
    logprobs: bool

    def usage(self) -> dict[str, int]:
        prompt = len(self.choices[0].turn.prompt_ids)
        sampled = sum(len(choice.turn.completion_ids) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def body(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {**choice.message, "refusal": None},
                "finish_reason": choice.finish_reason,
                "logprobs": choice.logprobs() if self.logprobs else None,
            }
            for index, choice in enumerate(self.choices)
        ]
        return self._envelope("chat.completion") | {"choices": choices, "usage": self.usage()}

    def events(self, *, with_usage: bool) -> Iterator[str]:
        """The answer as server-sent events."""
        envelope = self._envelope("chat.completion.chunk")

        def event(choices: list[dict[str, Any]], **more: Any) -> str:
            return f"data: {json.dumps(envelope | {'choices': choices} | more)}\n\n"

        for index, choice in enumerate(self.choices):
            logprobs = choice.logprobs() if self.logprobs else None
            for delta in _deltas(choice.message):
                yield event([{"index": index, "delta": delta, "finish_reason": None, "logprobs": logprobs}])
                logprobs = None  # only in the first chunk: clients concatenate them
            yield event([{"index": index, "delta": {}, "finish_reason": choice.finish_reason, "logprobs": None}])
        if with_usage:
            yield event([], usage=self.usage())
        yield "data: [DONE]\n\n"

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}


def _deltas(message: Message) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": None if message["content"] is None else ""}
    for piece in _chunks(message["content"] or ""):
        yield {"content": piece}
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        header = {"index": index, "id": call["id"], "type": "function"}
        yield {"tool_calls": [header | {"function": {"name": function["name"], "arguments": ""}}]}
        for piece in _chunks(function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _chunks(text: str) -> Iterator[str]:
    return (text[at : at + CHUNK] for at in range(0, len(text), CHUNK))
