"""What a tool returned, as text for the model: within its limit, and with a mark where something was cut off."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from covey.agents.tools.errors import ToolFailure

CHARACTERS_PER_TOKEN = 32  # more than any text has: what lies beyond is dropped before anything is tokenised
NOTHING = "(no output)"

Cut = Callable[[str, int], str]
"""The longest beginning of a text that has at most so many tokens."""


@dataclass(frozen=True, slots=True)
class Output:
    """The beginning of a text, and how many characters it had."""

    text: str
    length: int


def by_characters(text: str, limit: int) -> str:
    """Where no tokenizer is at hand: four characters a token."""
    return text[: 4 * limit]


def rendered(tool: str, value: Any, characters: int) -> Output:
    """A return value as text, no more than `characters` of it. One that is not JSON is a fault of the tool's author."""
    if value is None:
        text = NOTHING
    elif isinstance(value, str):
        text = value
    elif isinstance(value, (bool, int, float, list, dict)):
        text = _json(tool, value)
    else:
        raise _wrong(tool, f"returned {type(value).__name__}")
    return Output(text[:characters], len(text))


def _json(tool: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(tool, f"returned a {type(value).__name__} that is not JSON ({error})") from error


def _wrong(tool: str, what: str) -> ToolFailure:
    return ToolFailure("tool_result", f"tool {tool} {what}; it may return a string, number, bool, None, list or dict")


def within(output: Output, limit: int, cut: Cut) -> str:
    """At most `limit` tokens, and behind them a mark that says how much is missing."""
    whole = output.text[: limit * CHARACTERS_PER_TOKEN]
    text = cut(readable(whole), limit)
    return text if len(text) == output.length else f"{text}\n[cut: {len(text)} of {output.length} characters]"


def readable(text: str) -> str:
    """Halves of surrogate pairs are no characters, and tokenizers refuse them. The length stays."""
    return text.encode("utf-8", "replace").decode("utf-8")
