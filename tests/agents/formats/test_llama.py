from __future__ import annotations

from typing import Any

import pytest

from covey.agents.formats.base import MAX_CALLS
from covey.agents.formats.llama import LlamaFormat
from covey.tool_calls import Call, Parsed
from tests.agents.formats.test_hermes import SCHEMA, called

FORMAT = LlamaFormat()
SEARCH = '{"name": "search", "parameters": {"query": "covey"}}'
NOW = '{"name": "now", "parameters": {}}'


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (SEARCH, ""),
        (f"\n {SEARCH} \n", ""),
        (f"<|python_tag|>{SEARCH}", ""),
        (f"I look.\n<|python_tag|> {SEARCH}", "I look."),
        (f"{SEARCH};", ""),
        ('<function=search>{"query": "covey"}</function>', ""),
        ('I look. <function=search>\n{"query": "covey"}\n</function> Done.', "I look.\nDone."),
        (f"<think>\nHm.\n</think>\n\n{SEARCH}", "<think>\nHm.\n</think>"),
        (SEARCH.replace("parameters", "arguments"), ""),
        ('{"type": "function", "name": "search", "parameters": {"query": "covey"}}', ""),
        ('{"name": "search", "parameters": "{\\"query\\": \\"covey\\"}"}', ""),
        ("{'name': 'search', 'parameters': {'query': 'covey',}}", ""),
    ],
)
def test_one_call(text: str, content: str) -> None:
    parsed = FORMAT.parse(text)
    assert called(parsed) == [("search", {"query": "covey"})]
    assert parsed.message["content"] == content
    (made,) = parsed.message["tool_calls"]
    assert made["id"] == parsed.calls[0].id
    assert made["function"] == {"name": "search", "arguments": {"query": "covey"}}


@pytest.mark.parametrize(
    "text",
    [
        f"{SEARCH};{NOW}",
        f"{SEARCH} ; {NOW}",
        f"{SEARCH}\n{NOW}",
        f"<|python_tag|>{SEARCH}; {NOW};",
        '<function=search>{"query": "covey"}</function><function=now></function>',
        '<function=search>{"query": "covey"}</function>\n<function=now>{}</function>',
    ],
)
def test_several_calls_stay_in_the_text(text: str) -> None:
    parsed = FORMAT.parse(text)
    assert called(parsed) == [("search", {"query": "covey"}), ("now", {})]
    assert parsed.message == {"role": "assistant", "content": text}
    assert len({call.id for call in parsed.calls}) == 2


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "parameters": {"a": "};{"}}', {"a": "};{"}),
        ('<function=f>{"a": "</function>"}</function>', {"a": "</function>"}),
        ('<|python_tag|>{"name": "f"}', {}),
    ],
)
def test_accepted(text: str, arguments: dict[str, Any]) -> None:
    assert called(FORMAT.parse(text)) == [("f", arguments)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{SEARCH} is what I call.", "Something follows the tool call"),
        (f"{SEARCH}]", "Something follows the tool call"),
        (f"{SEARCH}; and", "Something follows the tool call"),
        ('{"name": "search", "parameters": {"query": "covey"}', "a closing bracket or quote is missing"),
        ('{"name": "search", "parameters": {query: 1}}', "expecting property name"),
        ('{"name": "search", "parameters": ["covey"]}', "arguments of search must be a JSON object"),
        ('{"name": "search", "parameters": {}, "query": "covey"}', 'unknown keys: "query"'),
        ("<|python_tag|>", "it is empty"),
        ("<|python_tag|>search.call(query='covey')", "not valid JSON"),
        ('<|python_tag|>{"query": "covey"}', 'has no "name"'),
        ('<function=search>{"query": "covey"}', "not closed: </function> is missing"),
        ("<function=search>covey</function>", "arguments of search are not valid JSON"),
        ("<function=search>[1]</function>", "arguments of search must be a JSON object"),
    ],
)
def test_malformed(text: str, words: str) -> None:
    parsed = FORMAT.parse(text)
    (call,) = parsed.calls
    assert call.problem is not None
    assert words in call.problem
    assert "Write a call as" in call.problem
    assert parsed.message == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Paris.",
        '{"name": "Alice", "age": 3}',
        '{"name": "Alice"}',
        '{"answer": 4}',
        '{"made": {"name": "f", "parameters": {}}}',
        '{"answer": 4',
        f"I would write {SEARCH}",
        "{1, 2, 3}",
        "f(x) = {x}",
        "a <function> b",
    ],
)
def test_text_is_an_answer(text: str) -> None:
    assert FORMAT.parse(text) == Parsed({"role": "assistant", "content": text})


def test_the_second_call_is_malformed() -> None:
    parsed = FORMAT.parse(f'{SEARCH};{{"nam": "now"}}')
    assert [call.problem is None for call in parsed.calls] == [True, False]
    assert "tool_calls" not in parsed.message


def test_the_limit_of_calls_in_a_reply() -> None:
    for text in (";".join([SEARCH] * 500), "<function=f>{}</function>" * 500):
        assert [call.problem is None for call in FORMAT.parse(text).calls] == [True] * MAX_CALLS + [False]
    for text in (";".join([SEARCH] * MAX_CALLS), "<function=f>{}</function>" * MAX_CALLS):
        assert [call.problem for call in FORMAT.parse(text).calls] == [None] * MAX_CALLS


def test_unclosed_thinking() -> None:
    assert [bool(call.problem) for call in FORMAT.parse(f"<think>\n<|python_tag|>{SEARCH}").calls] == [True]
    assert FORMAT.parse("<think>\nHm.").calls == ()


def test_results() -> None:
    good, bad = Call("search", {}, "aaaaaaaaa"), Call("", id="bbbbbbbbb", problem="…")
    tool = {"role": "tool", "name": "search", "tool_call_id": "aaaaaaaaa", "content": "found"}
    assert FORMAT.observe([(good, "found")]) == [tool]
    assert FORMAT.observe([(bad, "malformed")]) == [{"role": "user", "content": "malformed"}]
    plain = LlamaFormat(native_tools=False)
    said = {"role": "user", "content": "Result of search:\nfound\nmalformed"}
    assert plain.observe([(good, "found"), (bad, "malformed")]) == [said]
    assert plain.parse(SEARCH).message == {"role": "assistant", "content": SEARCH}


def test_instructions() -> None:
    text = FORMAT.instructions([SCHEMA])
    assert text is not None
    assert '"name": "search"' in text
    assert called(FORMAT.parse(text.splitlines()[-2])) == [("function name", {"parameter": "value"})]
    assert FORMAT.instructions([]) is None
