"""Tool calls of Hermes, Qwen2.5, Qwen3 and SmolLM.

    Some text.
    <tool_call>
    {"name": "search", "arguments": {"query": "covey"}}
    </tool_call>

A reply may have several calls, with text around them. Also accepted: arguments as a JSON string, `parameters` instead
of `arguments`, no arguments, and the JSON deviations of `json_repair.py`. Malformed: invalid JSON, a missing
`</tool_call>`, two calls in one pair of tags, a call in unclosed thinking.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from covey.agents.formats.base import (
    assistant,
    join_text,
    malformed,
    parse_call,
    result_messages,
    schemas_as_json,
    tagged_calls,
    unclosed_thinking,
)
from covey.replies import thinking_end
from covey.tool_calls import Call, Parsed, Results, Schemas

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
        return INSTRUCTIONS.format(tools=schemas_as_json(schemas)) if schemas else None

    def parse(self, text: str) -> Parsed:
        start = thinking_end(text)
        if start is None:
            return unclosed_thinking(text) if OPEN in text else Parsed(assistant(text))
        pieces, calls = _calls(text, start)
        if not self.native_tools or all(call.problem for call in calls):
            return Parsed(assistant(text), calls)
        return Parsed(assistant(join_text(pieces), calls), calls)

    def observe(self, results: Results) -> list[dict[str, Any]]:
        return result_messages(results, self.native_tools, _response)


def _calls(text: str, start: int) -> tuple[list[str], tuple[Call, ...]]:
    pieces, calls = tagged_calls(
        text, start, OPENING, CLOSE, HOW, lambda mark, body: parse_call(body, mark.start(), HOW)
    )
    if not calls and (stray := text.find(CLOSE, start)) >= 0:
        calls = [malformed(text, stray, f"A tool call is not opened: {OPEN} is missing. {HOW}")]
    return pieces, tuple(calls)


def _response(call: Call, text: str) -> str:
    """The form of Qwen's template. From it, Qwen3's template recognises that this is not a new question, and keeps past
    thinking."""
    return f"<tool_response>\n{text}\n</tool_response>"
