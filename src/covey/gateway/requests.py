"""A chat request, read and checked. Unknown fields are tolerated; known ones that cannot be followed are refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from covey.gateway.messages import Message, read_messages
from covey.gateway.refusal import Refused, wrong
from covey.types import RewardTable

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
