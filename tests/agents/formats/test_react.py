from __future__ import annotations

from typing import Any

import pytest

from covey.agents.formats.react import ReactFormat
from covey.tool_calls import Call
from tests.agents.formats.test_hermes import called


def schema(name: str, required: tuple[str, ...] = (), /, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


TEXT = {"type": "string"}
SCHEMAS = [
    schema("search", ("query",), query={**TEXT, "description": "What to look for."}, top_k={"type": "integer"}),
    schema("add", ("a", "b"), a={"type": "number"}, b={"type": "number"}),
    schema("square", ("x",), x={"type": "number"}),
    schema("greet", name={"type": ["string", "null"], "default": None}),
    schema("either", a=TEXT, b=TEXT),
    schema("now"),
]
FORMAT = ReactFormat(SCHEMAS)


def step(action: str, given: str) -> str:
    return f"Thought: I do it.\nAction: {action}\nAction Input: {given}"


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        (step("search", '{"query": "covey"}'), "search", {"query": "covey"}),
        (step("search", "covey"), "search", {"query": "covey"}),
        (step("search", '"covey"'), "search", {"query": "covey"}),
        (step("search", '"a" or "b"'), "search", {"query": '"a" or "b"'}),
        (step("search", "42"), "search", {"query": "42"}),
        (step("search", "two\nlines\n\nand more"), "search", {"query": "two\nlines\n\nand more"}),
        (step("search", "```\ncovey\n```"), "search", {"query": "covey"}),
        (step("search", '```json\n{"query": "covey"}\n```'), "search", {"query": "covey"}),
        (step("search", '\n{\n  "query": "covey"\n}'), "search", {"query": "covey"}),
        (step("search", "{'query': 'covey',}"), "search", {"query": "covey"}),
        (step("search", '{"query": "x\nAction: now"}'), "search", {"query": "x\nAction: now"}),
        (step("search", '{"query": "covey"} and so on'), "search", {"query": "covey"}),
        (step("`search`", "covey"), "search", {"query": "covey"}),
        (step("[search]", "covey"), "search", {"query": "covey"}),
        (step(' "search" ', "covey"), "search", {"query": "covey"}),
        ("Action: search\nInput: covey", "search", {"query": "covey"}),
        ("action: search\naction input: covey", "search", {"query": "covey"}),
        ("**Action:** search\n**Action Input**: covey", "search", {"query": "covey"}),
        ("  Action : search\n  Action Input : covey", "search", {"query": "covey"}),
        (step("square", "3"), "square", {"x": 3}),
        (step("square", "three"), "square", {"x": "three"}),
        (step("greet", "Ada"), "greet", {"name": "Ada"}),
        (step("greet", "true"), "greet", {"name": "true"}),
        (step("now", "{}"), "now", {}),
        (step("now", ""), "now", {}),
        (step("now", "None"), "now", {}),
        ("Action: now", "now", {}),
        ("Action: now\nObservation: noon", "now", {}),
        (step("unheard_of", "x"), "unheard_of", {"input": "x"}),
        (step("add", '{"a": 1, "b": 2}'), "add", {"a": 1, "b": 2}),
    ],
)
def test_an_action(text: str, name: str, arguments: dict[str, Any]) -> None:
    parsed = FORMAT.parse(text)
    assert called(parsed) == [(name, arguments)]
    assert parsed.answer is None
    assert parsed.message == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Thought: I know.\nFinal Answer: Paris", "Paris"),
        ("Final Answer: Paris", "Paris"),
        ("**Final Answer:** Paris ", "Paris"),
        ("final answer:\n\nParis\nand more: yes", "Paris\nand more: yes"),
        ("Final Answer:", ""),
        ("Final Answer: a\nAction: search\nAction Input: x", "a\nAction: search\nAction Input: x"),
        ("<think>\nAction: search\n</think>\nFinal Answer: Paris", "Paris"),
    ],
)
def test_a_final_answer(text: str, answer: str) -> None:
    parsed = FORMAT.parse(text)
    assert (parsed.calls, parsed.answer) == ((), answer)
    assert parsed.message == {"role": "assistant", "content": text}


def test_the_first_action_or_answer_counts() -> None:
    both = step("search", "covey") + "\nObservation: a group of birds\nThought: So.\nFinal Answer: birds"
    parsed = FORMAT.parse(both)
    assert called(parsed) == [("search", {"query": "covey"})]
    assert parsed.answer is None
    twice = step("search", "covey") + "\n" + step("now", "{}")
    assert called(FORMAT.parse(twice)) == [("search", {"query": "covey"})]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "neither an action nor a final answer"),
        ("Paris.", "neither an action nor a final answer"),
        ("Thought: I wonder.", "neither an action nor a final answer"),
        ("I take the Action: search", "neither an action nor a final answer"),
        ("Action:\nAction Input: x", "not the name of a tool"),
        ("Action: search\nand then\nAction Input: x", "not the name of a tool"),
        ("Action: search", "search has no Action Input"),
        ("Action: search\nThought: hm\nAction Input: covey", "search has no Action Input"),
        (step("search", ""), "Action Input of search is empty"),
        (step("search", '{"query": "covey"'), "Action Input of search is not valid JSON"),
        (step("search", "{query: covey}"), "Action Input of search is not valid JSON"),
        (step("add", "1, 2"), "Action Input of add must be a JSON object"),
        (step("either", "x"), "Action Input of either must be a JSON object"),
        (step("now", "please"), "now takes no input"),
        ("<think>\nAction: search", "thinking is not closed"),
    ],
)
def test_malformed(text: str, words: str) -> None:
    parsed = FORMAT.parse(text)
    (call,) = parsed.calls
    assert call.problem is not None
    assert words in call.problem
    assert parsed.answer is None
    assert parsed.message == {"role": "assistant", "content": text}


def test_results_are_observations() -> None:
    assert FORMAT.observe([(Call("search"), "a group of birds")]) == [
        {"role": "user", "content": "Observation: a group of birds"}
    ]
    assert FORMAT.observe([]) == []


def test_the_stop_string_prevents_made_up_results() -> None:
    text = step("search", "covey") + "\nObservation: made up"
    (stop,) = FORMAT.stop
    assert called(FORMAT.parse(text[: text.index(stop)])) == [("search", {"query": "covey"})]


def test_instructions_describe_the_tools() -> None:
    text = FORMAT.instructions(SCHEMAS)
    assert text is not None
    assert "- search(query: string, top_k: integer = optional): Does search.\n    query: What to look for." in text
    assert "- greet(name: string | null = null): Does greet." in text
    assert "- now(): Does now." in text
    assert not FORMAT.native_tools
    assert FORMAT.instructions([]) is None
