"""Hermes: Qwen2.5, Qwen3, Hermes, SmolLM.

    Some text.
    <tool_call>
    {"name": "search", "arguments": {"query": "covey"}}
    </tool_call>

Several calls may stand in one reply, with text around them. Accepted besides: arguments as JSON in a string,
`parameters` for `arguments`, none at all, and what `lenient.py` reads. Malformed: JSON that is none, a call without
`</tool_call>`, two calls in one pair of tags, a call inside thinking that is not closed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from covey.agents.formats.base import (
    Call,
    Parsed,
    Results,
    Schemas,
    as_json,
    assistant,
    joined,
    malformed,
    read_call,
    show,
    still_thinking,
    tagged,
)
from covey.replies import speech_start

OPEN, CLOSE = "<tool_call>", "</tool_call>"
OPENING = re.compile(OPEN)
HOW = f'Write a call as {OPEN}\n{{"name": "tool name", "arguments": {{"parameter": "value"}}}}\n{CLOSE}'
INSTRUCTIONS = """# Tools

You may call one or more of these functions. Their signatures stand between <tools> and </tools>:
<tools>
{tools}
</tools>

For each call write a JSON object with the function's name and its arguments between <tool_call> and </tool_call>:
<tool_call>
{{"name": "function name", "arguments": {{"parameter": "value"}}}}
</tool_call>
The result is shown to you between <tool_response> and </tool_response>. When you need no further call, answer."""


@dataclass(frozen=True, slots=True)
class HermesFormat:
    native_tools: bool = True

    name: ClassVar[str] = "hermes"
    stop: ClassVar[tuple[str, ...]] = ()

    def instructions(self, schemas: Schemas) -> str | None:
        return INSTRUCTIONS.format(tools=as_json(schemas)) if schemas else None

    def parse(self, text: str) -> Parsed:
        start = speech_start(text)
        if start is None:
            return still_thinking(text) if OPEN in text else Parsed(assistant(text))
        pieces, calls = _calls(text, start)
        if not self.native_tools or all(call.problem for call in calls):
            return Parsed(assistant(text), calls)
        return Parsed(assistant(joined(pieces), calls), calls)

    def observe(self, results: Results) -> list[dict[str, Any]]:
        return show(results, self.native_tools, _response)


def _calls(text: str, start: int) -> tuple[list[str], tuple[Call, ...]]:
    pieces, calls = tagged(text, start, OPENING, CLOSE, HOW, lambda mark, body: read_call(body, mark.start(), HOW))
    if not calls and (stray := text.find(CLOSE, start)) >= 0:
        calls = [malformed(text, stray, f"A tool call is not opened: {OPEN} is missing. {HOW}")]
    return pieces, tuple(calls)


def _response(call: Call, text: str) -> str:
    """As Qwen's template writes results: Qwen3 knows by it that this is no new question, and keeps its thinking."""
    return f"<tool_response>\n{text}\n</tool_response>"
