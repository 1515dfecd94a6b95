from __future__ import annotations

import re
from typing import Any

import pytest

from covey.agents.formats.base import MAX_CALLS
from covey.agents.formats.mistral import MistralFormat
from covey.tool_calls import Call, Parsed
from tests.agents.formats.test_hermes import SCHEMA, called

FORMAT = MistralFormat()
SEARCH = '{"name": "search", "arguments": {"query": "covey"}}'
NOW = '{"name": "now", "arguments": {}}'


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"[TOOL_CALLS] [{SEARCH}]", ""),
        (f"[TOOL_CALLS][{SEARCH}]", ""),
        (f"[TOOL_CALLS]{SEARCH}", ""),
        (f"I look.[TOOL_CALLS] [{SEARCH}] Done.", "I look.\nDone."),
        ('[TOOL_CALLS]search{"query": "covey"}', ""),
        ('[TOOL_CALLS]search[ARGS]{"query": "covey"}', ""),
        ('[TOOL_CALLS] search [ARGS] {"query": "covey"}', ""),
        ('[TOOL_CALLS]search[CALL_ID]a1B2c3D4e[ARGS]{"query": "covey"}', ""),
        (f"[{SEARCH}]", ""),
        (f" [ {SEARCH} ]\n", ""),
        (SEARCH, ""),
        ('search{"query": "covey"}', ""),
        ('search[ARGS]{"query": "covey"}', ""),
        (f"<think>\nHm.\n</think>[TOOL_CALLS][{SEARCH}]", "<think>\nHm.\n</think>"),
        ("[TOOL_CALLS] [{'name': 'search', 'arguments': {'query': 'covey',},},]", ""),
        ('[TOOL_CALLS] [{"name": "search", "arguments": "{\\"query\\": \\"covey\\"}"}]', ""),
        (f"[TOOL_CALLS] [{SEARCH.replace('arguments', 'parameters')}]", ""),
    ],
)
def test_one_call(text: str, content: str) -> None:
    parsed = FORMAT.parse(text)
    assert called(parsed) == [("search", {"query": "covey"})]
    assert parsed.message["content"] == content
    (made,) = parsed.message["tool_calls"]
    assert re.fullmatch("[A-Za-z0-9]{9}", made["id"])
    assert made["id"] == parsed.calls[0].id
    assert FORMAT.parse(text) == parsed


@pytest.mark.parametrize(
    "text",
    [
        f"[TOOL_CALLS] [{SEARCH}, {NOW}]",
        f"[TOOL_CALLS] [{SEARCH}]\n[TOOL_CALLS] [{NOW}]",
        '[TOOL_CALLS]search{"query": "covey"}[TOOL_CALLS]now{}',
        '[TOOL_CALLS]search[ARGS]{"query": "covey"}[TOOL_CALLS]now[ARGS]{}',
        '[TOOL_CALLS]search{"query": "covey"}now{}',
        f"[{SEARCH}, {NOW}]",
        'search{"query": "covey"}now{}',
        'search{"query": "covey"}\nnow{}',
    ],
)
def test_several_calls(text: str) -> None:
    parsed = FORMAT.parse(text)
    assert called(parsed) == [("search", {"query": "covey"}), ("now", {})]
    assert parsed.message["content"] == ""
    assert len({call["id"] for call in parsed.message["tool_calls"]}) == 2


def test_ids_of_the_model_are_kept_if_the_template_takes_them_and_they_differ() -> None:
    one, two = '{"name": "f", "arguments": {}, "id": "abcdef123"}', '{"name": "f", "arguments": {}, "id": "short"}'
    ids = [call.id for call in FORMAT.parse(f"[TOOL_CALLS] [{one}, {two}, {one}]").calls]
    assert ids[0] == "abcdef123"
    assert all(re.fullmatch("[A-Za-z0-9]{9}", ident) for ident in ids)
    assert len(set(ids)) == 3
    assert FORMAT.parse("[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{}").calls[0].id == "abcdef123"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": "[TOOL_CALLS] ]"}}]', {"a": "[TOOL_CALLS] ]"}),
        ('[TOOL_CALLS]f{"a": "}[ARGS]{"}', {"a": "}[ARGS]{"}),
    ],
)
def test_marks_inside_strings(text: str, arguments: dict[str, Any]) -> None:
    assert called(FORMAT.parse(text)) == [("f", arguments)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[TOOL_CALLS]", "it is empty"),
        ("[TOOL_CALLS] []", "must be a JSON object"),
        ("[TOOL_CALLS] search", "not valid JSON"),
        (f"[TOOL_CALLS] [{SEARCH}", "a closing bracket or quote is missing"),
        (f"[{SEARCH}", "a closing bracket or quote is missing"),
        (f"[{SEARCH}] Done.", "something follows"),
        ("[TOOL_CALLS] [1]", "must be a JSON object"),
        ('[TOOL_CALLS] [{"arguments": {}}]', 'has no "name"'),
        ('[TOOL_CALLS]search{"query": covey}', "arguments of search are not valid JSON"),
        ('[TOOL_CALLS]search{"query": ', "arguments of search are not valid JSON"),
    ],
)
def test_malformed(text: str, words: str) -> None:
    parsed = FORMAT.parse(text)
    (call,) = parsed.calls
    assert call.problem is not None
    assert words in call.problem
    assert "Write calls as [TOOL_CALLS]" in call.problem
    assert re.fullmatch("[A-Za-z0-9]{9}", call.id)
    assert parsed.message == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Paris.",
        "[]",
        "[1, 2, 3]",
        '[{"name": "Alice"}]',
        f'[{SEARCH}, {{"name": "Alice"}}]',
        '{"name": "Alice", "age": 3}',
        "search",
        "f{x}",
        'I call search{"query": "covey"}',
        'search{"query": "covey"} Done.',
        f"I would write {SEARCH}",
        "[link](there)",
    ],
)
def test_text_is_an_answer(text: str) -> None:
    assert FORMAT.parse(text) == Parsed({"role": "assistant", "content": text})


def test_one_of_two_is_malformed() -> None:
    parsed = FORMAT.parse(f'[TOOL_CALLS] [{SEARCH}, {{"arguments": {{}}}}]')
    assert [call.problem is None for call in parsed.calls] == [True, False]
    assert len(parsed.message["tool_calls"]) == 1


def test_the_limit_of_calls_in_a_reply() -> None:
    for number, more in ((MAX_CALLS, []), (MAX_CALLS + 1, [False]), (500, [False])):
        listed = ", ".join([NOW] * number)
        for text in (f"[TOOL_CALLS] [{listed}]", f"[{listed}]", "[TOOL_CALLS]now{}" * number, "now{}" * number):
            assert [call.problem is None for call in FORMAT.parse(text).calls] == [True] * MAX_CALLS + more


def test_unclosed_thinking() -> None:
    assert [bool(call.problem) for call in FORMAT.parse("<think>[TOOL_CALLS]now{}").calls] == [True]
    assert FORMAT.parse("<think>Hm.").calls == ()


def test_results() -> None:
    good, bad = Call("search", {}, "aaaaaaaaa"), Call("", id="bbbbbbbbb", problem="…")
    assert [message["role"] for message in FORMAT.observe([(good, "found"), (bad, "no")])] == ["tool", "tool"]
    assert FORMAT.observe([(bad, "no"), (bad, "nor")]) == [{"role": "user", "content": "no\nnor"}]
    plain = MistralFormat(native_tools=False)
    assert plain.observe([(good, "found")]) == [{"role": "user", "content": "Result of search:\nfound"}]
    assert plain.parse(f"[{SEARCH}]").message == {"role": "assistant", "content": f"[{SEARCH}]"}


def test_instructions() -> None:
    text = FORMAT.instructions([SCHEMA])
    assert text is not None
    assert '"name": "search"' in text
    assert called(FORMAT.parse(text.splitlines()[-2])) == [("function name", {"parameter": "value"})]
    assert FORMAT.instructions([]) is None
