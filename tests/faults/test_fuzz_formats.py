"""Whatever a model writes: tool calls are read or told to be malformed, in time that grows with the text only."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, Literal

import pytest
from hypothesis import strategies as st

from covey.agents.formats.detect import FORMATS, detect, make_format
from covey.agents.formats.json_repair import InvalidJson, parse_json, value_end
from covey.agents.render_demonstrations import WRITERS, call_text, render_messages
from covey.agents.tools.calculator import ExpressionError, calculate
from covey.agents.tools.schema import coerce
from covey.agents.tools.tool import ToolMistake, read_docstring, tool
from covey.errors import InputError
from covey.tool_calls import Call
from tests.faults.fuzzing import Target, json_values, mixed, repeated, scalars, suite, texts

MARKS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f", "arguments": {"x": 1}}', '"name"'),
    *("<|python_tag|>", "<function=f>", "<function=", "</function>", ";", '{"name": "f", "parameters": {}}'),
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "abcdefghi", "f{", '[{"name": "f", "arguments": {}}]', "f[ARGS]{}"),
    *("Thought:", "Action:", "Action Input:", "Observation:", "Final Answer:", "**Action:**", "\nAction: f", "`"),
    *("```python\n", "```", "\n```\n", "```py", "print(1)", "    ", "'", "{'a': True,}", ",", ":", "[", "]", "\\u"),
    *('{"a": ', '"\\', "\\'", "None", "-", "1e5", "\\ud800", "(", ")"),
]
SCHEMAS = tuple(
    {"type": "function", "function": {"name": name, "description": "?", "parameters": parameters}}
    for name, parameters in {
        "f": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        "g": {"type": "object", "properties": {}},
        "python_executor": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    }.items()
)
EVERY = [make_format(name, SCHEMAS, native_tools=native) for name in FORMATS for native in (True, False)]
replies = st.one_of(texts, mixed(MARKS), repeated(MARKS))


def parses(text: str) -> None:
    for form in EVERY:
        parsed = form.parse(text)
        assert parsed.message["role"] == "assistant" and isinstance(parsed.message["content"], str)
        assert len(parsed.calls) <= 33
        for call in parsed.calls:
            assert isinstance(call.name, str) and len(call.name) <= 128
            if call.problem is None:
                json.dumps(dict(call.arguments), allow_nan=False, ensure_ascii=False).encode(errors="strict")
            else:
                assert len(call.problem) < 3000
        form.observe([(call, "1") for call in parsed.calls])


def detects(text: str) -> None:
    assert detect(text, "llama") in FORMATS


def reads_lenient(text: str) -> None:
    end = value_end(text, 0)
    assert end is None or 0 < end <= len(text)
    try:
        value = parse_json(text)
    except InvalidJson as problem:
        assert 0 < len(str(problem)) < 500
    else:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


plain_text = st.text(st.characters(codec="utf-8"), max_size=30)
marked_text = st.lists(st.one_of(plain_text, st.sampled_from([m for m in MARKS if m != "\\ud800"])), max_size=4).map(
    "".join
)
values = json_values(
    ["name", "arguments"],
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | marked_text,
)
sayable = st.dictionaries(marked_text, values, max_size=3).filter(lambda v: _encodes(v))
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
calls = st.lists(st.builds(Call, names, sayable), min_size=1, max_size=3)


def _encodes(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def round_trip(made: list[Call]) -> None:
    """A call as a model would write it is read as the same call, whatever its strings hold."""
    for name in WRITERS:
        for native in (True, False):
            form = make_format(name, SCHEMAS, native_tools=native)
            found = form.parse(call_text(form, made)).calls
            assert [call.problem for call in found] == [None] * len(made), (name, found)
            assert [(c.name, dict(c.arguments)) for c in found] == [(c.name, dict(c.arguments)) for c in made], name


talk = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant"]), "content": replies}),
        st.fixed_dictionaries({"role": st.just("tool"), "content": texts}, optional={"tool_call_id": texts}),
        st.builds(
            lambda content, made, ids: {
                "role": "assistant",
                "content": content,
                "tool_calls": [
                    {"function": {"name": c.name, "arguments": dict(c.arguments)}, **({"id": i} if i else {})}
                    for c, i in zip(made, ids, strict=False)
                ],
            },
            texts,
            calls,
            st.lists(texts, min_size=3, max_size=3),
        ),
    ),
    min_size=1,
    max_size=5,
)


def writes_demonstrations(messages: list[dict[str, Any]]) -> None:
    for form in EVERY:
        try:
            found, _ = render_messages(messages, SCHEMAS, form)
        except InputError:
            continue
        assert all(isinstance(message["content"], str) for message in found)


NUMBERS = ["9", "10", "1e1000", ".", "0.5", "1,234", "99999999999", "1e-999", "π", "pi", "e", "1e308"]
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "^", "!", "(", ")", ",", " of ", "=", "×", "²"]
FUNCTIONS = ["sqrt(", "log(", "ln(", "exp(", "factorial(", "round(", "min(", "tan(", "floor(", "sin(", "abs(", "ceil("]
sums = st.one_of(
    st.lists(st.sampled_from(NUMBERS + OPERATORS + FUNCTIONS), max_size=25).map("".join),
    st.builds(
        lambda parts, mark: mark.join(parts), st.lists(st.sampled_from(NUMBERS), max_size=8), st.sampled_from(OPERATORS)
    ),
    repeated(NUMBERS + OPERATORS + FUNCTIONS, 2000),
    texts,
)


def calculates(text: str) -> None:
    try:
        found = calculate(text)
    except ExpressionError as error:
        assert 0 < len(str(error)) < 2000
    else:
        assert isinstance(found, str) and 0 < len(found) < 2000


class Colour(Enum):
    RED = 1
    BLUE = "b"


KINDS: list[Any] = [
    *(str, int, float, bool, None.__class__, Any, list, dict, list[int], dict[str, float], Literal["a", 1, None]),
    *(Colour, int | None, list[dict[str, int | str]], float | list[str] | None, dict[str, Colour]),
]


def coerces(given: tuple[Any, Any]) -> None:
    kind, value = given
    try:
        coerce(kind, value)
    except ValueError as error:
        assert 0 < len(str(error)) < 1000


@tool
def everything(
    a: str, b: int = 1, c: float = 1.0, d: bool = False, e: list[int] | None = None, f: dict[str, Colour] | None = None
) -> str:
    """A tool of every kind of parameter."""
    return a


def checks_arguments(arguments: dict[str, Any]) -> None:
    try:
        found = everything.check(arguments)
    except ToolMistake as error:
        assert len(str(error)) < 20_000
    else:
        json.dumps(everything.plain(found))
        everything.answer(found)


DOC = [
    "Args:",
    "Arguments:",
    ":param x:",
    ":param int x:",
    "Returns:",
    "x:",
    "x (int):",
    "\n",
    "\n\n",
    "    ",
    ";",
    ": ",
]


def reads_docstring(text: str) -> None:
    about, found = read_docstring(text, ["x", "top_k"])
    assert isinstance(about, str) and set(found) <= {"x", "top_k"}


written_values = st.one_of(
    json_values(["a"]), texts, st.sampled_from(["[" * 5000, "9" * 5000, "1" * 400, "1_0", " 1 "])
)
TARGETS = [
    Target("formats/parse", replies, parses, 120),
    Target("formats/detect", mixed(["<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '"parameters"']), detects, 20),
    Target("formats/lenient", replies, reads_lenient, 100),
    Target("formats/round-trip", calls, round_trip, 100),
    Target("formats/demonstrations", talk, writes_demonstrations, 60),
    Target("tools/calculator", sums, calculates, 200),
    Target("tools/coerce", st.tuples(st.sampled_from(KINDS), written_values), coerces, 200),
    Target(
        "tools/arguments",
        st.dictionaries(st.sampled_from("abcdefg") | texts, written_values | scalars, max_size=5),
        checks_arguments,
        100,
    ),
    Target("tools/docstring", st.one_of(mixed(DOC), repeated(DOC)), reads_docstring, 60),
]
test_fuzz = suite(TARGETS)


@pytest.mark.parametrize(
    "expression", ["9**9**9", "factorial(10**9)", "(" * 500 + "1" + ")" * 500, "10**10**10", "1e999999"]
)
def test_bombs_of_the_calculator_are_told(expression: str) -> None:
    with pytest.raises(ExpressionError):
        calculate(expression)
