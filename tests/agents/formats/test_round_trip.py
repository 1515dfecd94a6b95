"""Calls written in a format are parsed back, whatever they contain; any other text never raises and ends in time."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from covey.agents.formats.detect import FORMATS, make_format
from covey.agents.formats.hermes import HermesFormat
from covey.tool_calls import Format, Parsed
from tests.agents.formats.test_react import SCHEMAS

MARKS = [
    *("<tool_call>", "</tool_call>", "<tool_response>", "<think>", "</think>", "<|im_end|>", "<function=f>"),
    *("</function>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "```", "```python\n", "\n```\n"),
    *("\nAction: ", "\nInput: ", "\nAction Input: ", "\nFinal Answer: ", "\nObservation: ", '"name"', '"arguments"'),
    *('{"name": "f", "arguments": {}}', "{", "}", "[", "]", '"', "'", "\\", "\n", "\t", ",", ":", ";", " ", "True"),
    *("None", "null", "é", "日本", "😀", "\u2028", "a", "search", "0", "-1.5e3", "\x00", "\x7f", "\r\n", "\\u00e9"),
    *("\\n", '\\"', "<", ">", "|", "*", "`", "\\ud83d", "\\udc00"),
]
Arguments = dict[str, Any]


def some_text(rng: random.Random, most: int = 8) -> str:
    return "".join(rng.choices(MARKS, k=rng.randint(0, most)))


def some_value(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.randrange(8 if depth else 6)
    if kind == 6:
        return [some_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == 7:
        return some_arguments(rng, depth - 1)
    plain = [some_text(rng), some_text(rng), rng.randint(-(10**20), 10**20), rng.uniform(-1e9, 1e9), rng.random() < 0.5]
    return [*plain, None][kind]


def some_arguments(rng: random.Random, depth: int = 3) -> Arguments:
    return {some_text(rng, 3): some_value(rng, depth) for _ in range(rng.randint(0, 4))}


def as_json(rng: random.Random, value: Any) -> str:
    return json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 2)))


def as_python(value: Any) -> str:
    """Python's way of writing it, in single quotes throughout; its escapes are those of JSON here."""
    if isinstance(value, str):
        escaped = json.dumps(value)[1:-1].replace('\\"', '"').replace("'", "\\'")
        return f"'{escaped}'"
    if isinstance(value, dict):
        return "{" + "".join(f"{as_python(key)}: {as_python(one)}, " for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + "".join(f"{as_python(one)}, " for one in value) + "]"
    return repr(value)


# -- Writers, one per syntax -----------------------------------------------------------------------------------------


def hermes(rng: random.Random, calls: list[tuple[str, Arguments]]) -> str:
    space = rng.choice(("\n", "", " "))
    bodies = (as_json(rng, {"name": name, "arguments": arguments}) for name, arguments in calls)
    return rng.choice(("\n", "", "\nand\n")).join(f"<tool_call>{space}{body}{space}</tool_call>" for body in bodies)


def hermes_python(rng: random.Random, calls: list[tuple[str, Arguments]]) -> str:
    bodies = (as_python({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def hermes_string(rng: random.Random, calls: list[tuple[str, Arguments]]) -> str:
    bodies = (json.dumps({"name": name, "arguments": as_json(rng, arguments)}) for name, arguments in calls)
    return "".join(f"<tool_call>{body}</tool_call>" for body in bodies)


def llama(rng: random.Random, calls: list[tuple[str, Arguments]]) -> str:
    tag = rng.choice(("", "<|python_tag|>"))
    bodies = (as_json(rng, {"name": name, "parameters": arguments}) for name, arguments in calls)
    return tag + rng.choice((";", " ; ", "\n")).join(bodies)


def llama_tagged(rng: random.Random, calls: list[tuple[str, Arguments]]) -> str:
    return "\n".join(f"<function={name}>{as_json(rng, arguments)}</function>" for name, arguments in calls)


def mistral_list(rng: random.Random, calls: list[tuple[str, Arguments]]) -> str:
    body = as_json(rng, [{"name": name, "arguments": arguments} for name, arguments in calls])
    return rng.choice(("[TOOL_CALLS] ", "[TOOL_CALLS]", "")) + body


def mistral_named(rng: random.Random, calls: list[tuple[str, Arguments]]) -> str:
    mark, args = rng.choice((("[TOOL_CALLS]", "[ARGS]"), ("[TOOL_CALLS]", ""), ("", "")))
    return "".join(f"{mark}{name}{args}{as_json(rng, arguments)}" for name, arguments in calls)


def react(rng: random.Random, calls: list[tuple[str, Arguments]]) -> str:
    ((name, arguments),) = calls
    label = rng.choice(("Action Input", "Input"))
    return f"Thought: so.\nAction: {name}\n{label}: {as_json(rng, arguments)}" + rng.choice(("", "\nObservation: x"))


WRITERS: dict[Callable[..., str], str] = {
    hermes: "hermes",
    hermes_python: "hermes",
    hermes_string: "hermes",
    llama: "llama",
    llama_tagged: "llama",
    mistral_list: "mistral",
    mistral_named: "mistral",
    react: "react",
}


def some_calls(rng: random.Random, writer: Callable[..., str]) -> list[tuple[str, Arguments]]:
    names = ("search", "add", "get_weather-2", "a.b")
    return [(rng.choice(names), some_arguments(rng)) for _ in range(1 if writer is react else rng.randint(1, 4))]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_calls_are_read_back(writer: Callable[..., str], native: bool) -> None:
    format = make_format(WRITERS[writer], SCHEMAS, native_tools=native)
    for seed in range(400):
        rng = random.Random(f"{writer.__name__} {seed}")
        calls = some_calls(rng, writer)
        text = writer(rng, calls)
        parsed = format.parse(text)
        assert [call.problem for call in parsed.calls] == [None] * len(calls), text
        assert [(call.name, call.arguments) for call in parsed.calls] == calls, text
        assert all(repr(call.arguments) == repr(given) for call, (_, given) in zip(parsed.calls, calls, strict=True))
        check(parsed)


def test_code_is_read_back() -> None:
    format = make_format("code")
    for seed in range(400):
        rng = random.Random(seed)
        ends = re.compile(r"[ \t\r]*```+[ \t\r]*|[ \t]*</think>.*|.*</think>[ \t]*")  # of the block, of thinking
        code = "\n".join(["x", *(line for line in some_text(rng, 40).split("\n") if not ends.fullmatch(line))])
        parsed = format.parse(f"So:\n```python\n{code}\n```" + rng.choice(("", "\nDone.")))
        assert parsed.calls[0].arguments == {"code": code}
        check(parsed)


# -- Texts without calls ---------------------------------------------------------------------------------------------


def check(parsed: Parsed) -> None:
    """What holds of every reply, however broken."""
    assert parsed.message["role"] == "assistant"
    assert isinstance(parsed.message["content"], str)
    json.dumps(parsed.message, allow_nan=False, ensure_ascii=False).encode()
    sound = [call for call in parsed.calls if call.problem is None]
    assert all(call.name and isinstance(call.arguments, dict) for call in sound)
    assert all((call.problem or "").encode() for call in parsed.calls if call not in sound)
    assert all(re.fullmatch("[A-Za-z0-9]{9}", call.id) for call in parsed.calls)
    assert len({call.id for call in parsed.calls}) == len(parsed.calls)
    shown = parsed.message.get("tool_calls")
    assert shown is None or [one["id"] for one in shown] == [call.id for call in sound]
    assert parsed.answer is None or not parsed.calls


def mutated(rng: random.Random, text: str) -> str:
    for _ in range(rng.randint(1, 4)):
        at, to = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        to = min(to, at + rng.choice((1, 1, 5, 40)))
        piece = rng.choice((text[at:to] * 2, "", rng.choice(MARKS), chr(rng.randrange(0xD800)), text[at:to][::-1]))
        text = rng.choice((text[:at] + piece + text[to:], text[:at] + piece + text[at:], text[:to]))
    return text


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_any_text_is_parsed_without_raising(name: str, native: bool) -> None:
    format = make_format(name, SCHEMAS, native_tools=native)
    outcomes = set()
    for seed in range(3000):
        rng = random.Random(seed)
        writer = rng.choice([*WRITERS])
        text = some_text(rng, 60) if seed % 3 == 0 else mutated(rng, writer(rng, some_calls(rng, writer)))
        parsed = format.parse(text)
        check(parsed)
        format.observe([(call, call.problem or "ok") for call in parsed.calls])
        outcomes |= {"call" if call.problem is None else "problem" for call in parsed.calls} or {"text"}
    assert outcomes >= {"problem", "text"}


def test_a_truncated_call_is_not_run() -> None:
    """Every beginning of a reply that ends before the last tag: what is run of it is what was whole."""
    rng = random.Random(0)
    calls = [("search", some_arguments(rng)), ("add", some_arguments(rng))]
    text = hermes(rng, calls)
    for length in range(len(text)):
        sound = [(call.name, call.arguments) for call in HermesFormat().parse(text[:length]).calls if not call.problem]
        assert sound == calls[: len(sound)]
        assert len(sound) < 2


LONG = 100_000
ADVERSARIES = [
    *MARKS,
    '<tool_call>{"',
    "<tool_call>{'a\"': \"",
    '<tool_call>{"a": "</tool_call>',
    "<tool_call>{\"'</tool_call>",
    "<tool_call>\"''</tool_call>",
    "<function=f>{",
    '<function=f>{"a": "',
    "[TOOL_CALLS]f{",
    '[TOOL_CALLS]f{"',
    "f{}",
    'f{"a": [',
    "f[CALL_ID]",
    '{"name": "f", "parameters": {',
    '{"name": "f", "parameters": {}}',
    "Action: ",
    "Action: search\n",
    "Action: search\nAction Input: {",
    "\n**",
    "\n   ",
    "\n```",
    "\n```python",
    "</think>   ",
    "\n  </think>x",
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("unit", ADVERSARIES, ids=range(len(ADVERSARIES)))
def test_long_replies_take_linear_time(name: str, unit: str) -> None:
    """At once, where time grows with the length. A regular expression gone wrong would take hours."""
    format: Format = make_format(name, SCHEMAS)
    for head in (
        "",
        "<tool_call>",
        "[TOOL_CALLS]",
        '{"name": "f", "parameters": ',
        "Action: search\nInput: ",
        "```python\n",
    ):
        parsed = format.parse(head + unit * (LONG // len(unit)))
        check(parsed)
        assert len(parsed.calls) <= 33
        assert all(len(call.problem or "") < 1000 for call in parsed.calls)
