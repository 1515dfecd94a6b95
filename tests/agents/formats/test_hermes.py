from __future__ import annotations

import re
from typing import Any

import pytest

from covey.agents.formats.base import MAX_CALLS
from covey.agents.formats.hermes import HermesFormat
from covey.tool_calls import Call, Parsed

FORMAT = HermesFormat()
SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search {everything}.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


def called(parsed: Parsed) -> list[tuple[str, dict[str, Any]]]:
    assert all(call.problem is None for call in parsed.calls)
    return [(call.name, dict(call.arguments)) for call in parsed.calls]


def wrapped(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


SEARCH = wrapped('{"name": "search", "arguments": {"query": "covey"}}')


def test_one_call() -> None:
    parsed = FORMAT.parse(f"Let me look.\n{SEARCH}")
    assert called(parsed) == [("search", {"query": "covey"})]
    assert parsed.answer is None
    ident = parsed.calls[0].id
    assert re.fullmatch("[A-Za-z0-9]{9}", ident)
    function = {"name": "search", "arguments": {"query": "covey"}}
    assert parsed.message == {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [{"type": "function", "id": ident, "function": function}],
    }


def test_several_calls_with_text_around() -> None:
    now = wrapped('{"name": "now"}')
    text = f"First.\n{SEARCH}\n\nThen  this:\n{now} Done."
    parsed = FORMAT.parse(text)
    assert called(parsed) == [("search", {"query": "covey"}), ("now", {})]
    assert parsed.message["content"] == "First.\nThen  this:\nDone."
    assert len({call.id for call in parsed.calls}) == 2


def test_white_space_between_calls_is_dropped() -> None:
    assert FORMAT.parse(f"\n{SEARCH}\n \n{SEARCH}\n").message["content"] == ""


def test_the_same_call_twice_has_two_ids_and_the_same_reply_the_same_ids() -> None:
    first, second = FORMAT.parse(SEARCH + SEARCH), FORMAT.parse(SEARCH + SEARCH)
    assert first == second
    assert len({call.id for call in first.calls}) == 2


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f", "arguments": {}}', {}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f", "arguments": ""}', {}),
        ('{"name": "f", "arguments": " "}', {}),
        ('{"name": "f", "arguments": "{\\"a\\": [1, 2]}"}', {"a": [1, 2]}),
        ('{"name": "f", "parameters": {"a": 1}}', {"a": 1}),
        ('{"type": "function", "id": "x", "name": "f", "arguments": {"a": 1}}', {"a": 1}),
        ('{"arguments": {"a": 1}, "name": " f "}', {"a": 1}),
        ("{'name': 'f', 'arguments': {'a': True,},}", {"a": True}),
        ('{"name": "f", "arguments": {"code": "if x:\n    y"}}', {"code": "if x:\n    y"}),
        ('{"name": "f", "arguments": {"a": "</tool_call>"}}', {"a": "</tool_call>"}),
        ('{"name": "f", "arguments": {"a": "<tool_call>{}</tool_call>"}}', {"a": "<tool_call>{}</tool_call>"}),
        ('{"name": "f", "arguments": {"a": "</think>"}}', {"a": "</think>"}),
        ('{"name": "f", "arguments": {"a": "<think>"}}', {"a": "<think>"}),
    ],
)
@pytest.mark.parametrize("frame", ["<tool_call>\n{}\n</tool_call>", "<tool_call>{}</tool_call>"])
def test_accepted(frame: str, body: str, arguments: dict[str, Any]) -> None:
    assert called(FORMAT.parse(frame.replace("{}", body))) == [("f", arguments)]


HOW = '<tool_call>\n{"name": "tool name", "arguments": {"parameter": "value"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "words", "name"),
    [
        (wrapped(""), "not valid JSON: it is empty", ""),
        (wrapped("search(query='covey')"), "not valid JSON: expecting value", ""),
        (wrapped('{"name": "f", "arguments": {"a": 1}'), "a closing bracket or quote is missing", ""),
        (wrapped('{"name": "f", "arguments": {}}}'), "something follows", ""),
        (wrapped('{"name": "f"}\n{"name": "g"}'), "something follows", ""),
        (wrapped('[{"name": "f"}]'), "must be a JSON object", ""),
        (wrapped('"f"'), "must be a JSON object", ""),
        (wrapped('{"arguments": {}}'), 'has no "name"', ""),
        (wrapped('{"name": "", "arguments": {}}'), 'has no "name"', ""),
        (wrapped('{"name": " ", "arguments": {}}'), 'has no "name"', ""),
        (wrapped('{"name": ["f"], "arguments": {}}'), 'has no "name"', ""),
        (wrapped('{"name": "f", "arguments": [1]}'), "arguments of f must be a JSON object", "f"),
        (wrapped('{"name": "f", "arguments": 3}'), "arguments of f must be a JSON object", "f"),
        (wrapped('{"name": "f", "arguments": "covey"}'), "arguments of f are not valid JSON", "f"),
        (wrapped('{"name": "f", "arguments": "[1]"}'), "arguments of f must be a JSON object", "f"),
        (wrapped('{"name": "f", "arguments": {}, "parameters": {}}'), "both", "f"),
        (wrapped('{"name": "f", "query": "x"}'), 'unknown keys: "query"', "f"),
        (wrapped('{"name": "f", "arguments": {"a": 1, "a": 2}}'), 'the key "a" is given twice', ""),
        ('<tool_call>\n{"name": "f", "arguments": {}}', "not closed: </tool_call> is missing", ""),
        ('Text <tool_call>\n{"name": "f", "argu', "not closed: </tool_call> is missing", ""),
        ("<tool_call>", "not closed: </tool_call> is missing", ""),
        ("</tool_call>", "not opened: <tool_call> is missing", ""),
        (wrapped(f'{{"name": "{"f" * 129}"}}'), "longer than 128 characters", ""),
        ('{"name": "f", "arguments": {}}\n</tool_call>', "not opened: <tool_call> is missing", ""),
    ],
)
def test_malformed(text: str, words: str, name: str) -> None:
    parsed = FORMAT.parse(text)
    (call,) = parsed.calls
    assert call.problem is not None
    assert words in call.problem
    assert call.problem.endswith(HOW)
    assert (call.name, call.arguments) == (name, {})
    assert re.fullmatch("[A-Za-z0-9]{9}", call.id)
    assert parsed.message == {"role": "assistant", "content": text}


def test_one_call_is_malformed_and_another_is_not() -> None:
    parsed = FORMAT.parse(f"A\n{wrapped('{broken')}\nB\n{SEARCH}\nC")
    assert [call.problem is None for call in parsed.calls] == [False, True]
    assert parsed.message["content"] == "A\n<tool_call>\n{broken\n</tool_call>\nB\nC"
    assert [call["function"]["name"] for call in parsed.message["tool_calls"]] == ["search"]


def test_a_call_that_is_not_closed_does_not_swallow_the_next() -> None:
    parsed = FORMAT.parse('<tool_call>\n{"name": "f"}\n' + SEARCH)
    assert [call.problem is None for call in parsed.calls] == [False, True]
    assert parsed.calls[1].name == "search"


@pytest.mark.parametrize("text", ["", "Paris.", '{"name": "f", "arguments": {}}', "a < b > c", "  spaced \n\n"])
def test_text_is_an_answer_and_stays_as_it_is(text: str) -> None:
    assert FORMAT.parse(text) == Parsed({"role": "assistant", "content": text})


class TestThinking:
    def test_a_call_in_the_thinking_is_ignored(self) -> None:
        text = f"<think>\nMaybe {SEARCH}?\n</think>\n\nParis."
        assert FORMAT.parse(text) == Parsed({"role": "assistant", "content": text})

    def test_a_call_after_the_thinking(self) -> None:
        think = f"<think>\nMaybe {SEARCH} ?\n\n</think>\n\nI look."
        parsed = FORMAT.parse(f"{think}\n{SEARCH}")
        assert called(parsed) == [("search", {"query": "covey"})]
        assert parsed.message["content"] == think

    def test_thinking_that_the_prompt_opened(self) -> None:
        think = f"Maybe {SEARCH}?\n</think>"
        assert FORMAT.parse(f"{think}\n\nParis.").calls == ()
        parsed = FORMAT.parse(f"{think}\n\n{SEARCH}")
        assert called(parsed) == [("search", {"query": "covey"})]
        assert parsed.message["content"] == think

    def test_unclosed_thinking(self) -> None:
        parsed = FORMAT.parse(f"<think>\nMaybe {SEARCH}")
        assert [call.problem for call in parsed.calls] == [
            "Your thinking is not closed. Write </think> first, then the call or the answer."
        ]
        assert FORMAT.parse("<think>\nHm.").calls == ()


def test_the_limit_of_calls_in_a_reply() -> None:
    assert [call.problem for call in FORMAT.parse(SEARCH * MAX_CALLS).calls] == [None] * MAX_CALLS
    parsed = FORMAT.parse(SEARCH * 500)
    assert len(parsed.calls) == MAX_CALLS + 1
    assert [call.problem is None for call in parsed.calls] == [True] * MAX_CALLS + [False]
    assert len(parsed.message["tool_calls"]) == MAX_CALLS


class TestResults:
    good, other = Call("search", {"query": "x"}, "aaaaaaaaa"), Call("now", {}, "bbbbbbbbb")
    bad = Call("", id="ccccccccc", problem="…")

    def test_as_tool_messages(self) -> None:
        assert FORMAT.observe([(self.good, "found"), (self.bad, "malformed"), (self.other, "12:00")]) == [
            {"role": "tool", "name": "search", "tool_call_id": "aaaaaaaaa", "content": "found"},
            {"role": "tool", "name": "unknown", "tool_call_id": "ccccccccc", "content": "malformed"},
            {"role": "tool", "name": "now", "tool_call_id": "bbbbbbbbb", "content": "12:00"},
        ]

    def test_without_valid_calls_results_are_a_user_message(self) -> None:
        content = "<tool_response>\nmalformed\n</tool_response>"
        assert FORMAT.observe([(self.bad, "malformed")]) == [{"role": "user", "content": content}]

    def test_without_native_tools_results_are_a_user_message(self) -> None:
        plain = HermesFormat(native_tools=False)
        content = "<tool_response>\nfound\n</tool_response>\n<tool_response>\n12:00\n</tool_response>"
        assert plain.observe([(self.good, "found"), (self.other, "12:00")]) == [{"role": "user", "content": content}]

    def test_nothing(self) -> None:
        assert FORMAT.observe([]) == []


def test_without_native_tools_calls_stay_in_the_text() -> None:
    text = f"I look. {SEARCH}"
    parsed = HermesFormat(native_tools=False).parse(text)
    assert called(parsed) == [("search", {"query": "covey"})]
    assert parsed.message == {"role": "assistant", "content": text}


def test_instructions_show_the_tools_and_a_call_that_the_format_reads() -> None:
    text = FORMAT.instructions([SCHEMA])
    assert text is not None
    assert '"name": "search", "description": "Search {everything}."' in text
    example = text[text.index("<tool_call>\n") :]
    assert called(FORMAT.parse(example)) == [("function name", {"parameter": "value"})]
    assert FORMAT.instructions([]) is None
