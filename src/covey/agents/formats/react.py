"""ReAct: thoughts, actions and observations in labelled lines.

    Thought: I need the year.                     Thought: I know enough.
    Action: search                                Final Answer: 1889
    Action Input: {"query": "Eiffel tower"}

Yao et al. 2022, https://arxiv.org/abs/2210.03629

A line begins with its label, in any case, and may be bold (`**Action:** search`). `Input:` is short for `Action
Input:`. The name of a tool may be in quotes, backticks or brackets. The input is a JSON object (see `json_repair.py`),
or plain text for a tool with one required parameter (or only one); a fence around it is removed. The first action or
final answer counts; text after an action is ignored, since its result would be made up. Malformed: neither action nor
answer, an action without an input, an input that is neither JSON nor plain text for its tool.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from covey.agents.formats.base import (
    MAX_NAME,
    assistant,
    call_id,
    describe_tools,
    function_of,
    malformed,
    unclosed_thinking,
)
from covey.agents.formats.json_repair import InvalidJson, parse_json, skip_space, value_end
from covey.replies import thinking_end
from covey.tool_calls import Call, Parsed, Results, Schemas

LABEL = re.compile(
    r"^[ \t]*+\**+(?P<label>thought|action input|input|action|observation|final answer)\**+[ \t]*+:\**+",
    re.IGNORECASE | re.MULTILINE,
)
FENCE = re.compile(r"\A(`{3,}+)[\w+-]*+[ \t]*+\n(.*)\n[ \t]*+\1\Z", re.DOTALL)
HOW = (
    "Write either\nThought: what to do\nAction: the name of a tool\nAction Input: its arguments as a JSON object\n"
    "or\nThought: why you are done\nFinal Answer: the answer"
)
INSTRUCTIONS = """Answer the question with the help of these tools:

{tools}

Write one step at a time, in these lines:
Thought: what to do next
Action: the name of one tool
Action Input: its arguments as a JSON object
Then stop: the result is shown to you as
Observation: the result
Take as many steps as you need. When you know the answer, write
Thought: why you are done
Final Answer: the answer"""


@dataclass(frozen=True)
class ReactFormat:
    schemas: Schemas = ()

    name: ClassVar[str] = "react"
    stop: ClassVar[tuple[str, ...]] = ("\nObservation:",)
    native_tools: ClassVar[bool] = False

    def instructions(self, schemas: Schemas) -> str | None:
        return INSTRUCTIONS.format(tools=describe_tools(schemas)) if schemas else None

    def parse(self, text: str) -> Parsed:
        message = assistant(text)
        start = thinking_end(text)
        if start is None:
            return unclosed_thinking(text)
        for label in LABEL.finditer(text, start):
            kind = label["label"].lower()
            if kind == "final answer":
                return Parsed(message, answer=text[label.end() :].strip())
            if kind == "action":
                return Parsed(message, (self._call(text, label),))
        problem = f"There is neither an action nor a final answer. {HOW}"
        return Parsed(message, (malformed(text, start, problem),))

    def observe(self, results: Results) -> list[dict[str, Any]]:
        if not results:
            return []
        return [{"role": "user", "content": "\n".join(f"Observation: {text}" for _, text in results)}]

    def _call(self, text: str, action: re.Match[str]) -> Call:
        following = LABEL.search(text, action.end())
        name = text[action.end() : following.start() if following else len(text)].strip().strip("`'\"[]*").strip()
        if not name or "\n" in name or len(name) > MAX_NAME:
            return malformed(text, action.start(), f"The action is not the name of a tool. {HOW}")
        if following is None or following["label"].lower() not in ("action input", "input"):
            if self._parameter(name) == {}:
                return Call(name, {}, call_id(text, action.start()))
            return malformed(text, action.start(), f"The action {name} has no Action Input. {HOW}", name)
        arguments = self._arguments(name, _input(text, following.end()))
        if isinstance(arguments, str):
            return malformed(text, action.start(), f"{arguments} {HOW}", name)
        return Call(name, arguments, call_id(text, action.start()))

    def _arguments(self, name: str, text: str) -> dict[str, Any] | str:
        """The arguments in an input, or a string that says what is wrong with it."""
        if text.startswith("{"):
            try:
                value = parse_json(text)
            except InvalidJson as problem:
                return f"The Action Input of {name} is not valid JSON: {problem}."
            return value if isinstance(value, dict) else f"The Action Input of {name} must be a JSON object."
        parameter = self._parameter(name)
        if parameter is None:
            return f"The Action Input of {name} must be a JSON object."
        if not parameter:
            return {} if text.lower() in ("", "none", "null") else f"{name} takes no input: write Action Input: {{}}."
        ((key, schema),) = parameter.items()
        return {key: _convert(text, schema)} if text else f"The Action Input of {name} is empty."

    def _parameter(self, name: str) -> Mapping[str, Any] | None:
        """The parameter that plain text stands for, with its schema: empty if the tool has no parameters, None if there
        is more than one candidate. For an unknown tool any name will do: the call is refused later."""
        functions = [function_of(schema) for schema in self.schemas]
        function = next((function for function in functions if function["name"] == name), None)
        if function is None:
            return {"input": {}}
        parameters = function.get("parameters") or {}
        properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
        if not properties:
            return {}
        candidates = list(required) or list(properties)
        return {candidates[0]: properties.get(candidates[0], {})} if len(candidates) == 1 else None


def _input(text: str, start: int) -> str:
    """The input: its JSON object, or the text up to the next labelled line."""
    if text.startswith("{", skip_space(text, start)) and (end := value_end(text, start)) is not None:
        return text[start:end].strip()
    following = LABEL.search(text, start)
    plain = text[start : following.start() if following else len(text)].strip()
    fenced = FENCE.match(plain)
    return fenced[2].strip() if fenced else plain


def _convert(text: str, schema: Mapping[str, Any]) -> Any:
    """Plain text as the value of a parameter. A string is kept as it is, except for quotes around it."""
    quoted = len(text) > 1 and text[0] == text[-1] == '"'
    kind = schema.get("type", "string") if isinstance(schema, Mapping) else "string"  # it may also be `true`
    if "string" in kind and not quoted:
        return text
    try:
        return parse_json(text)
    except InvalidJson:
        return text
