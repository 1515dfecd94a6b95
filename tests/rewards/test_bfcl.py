"""bfcl by the rules of the leaderboard, by hand. Its ground truth: tests/benchmarks/test_scoring.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from covey.errors import InputError
from covey.rewards.bfcl import MAX_LENGTH, CallParseError, accepts, parse_calls
from tests.rewards.replies import episode_of, scored, task_of

# -- Parsing calls -----------------------------------------------------------------------------------------------------


ONE = ("f", {"a": 1})


@pytest.mark.parametrize(
    ("reply", "calls"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [ONE]),
        ('Sure:\n<tool_call>\n{"name": "f", "parameters": {"a": 1}}\n</tool_call>\nDone.', [ONE]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n{"name": "g"}</tool_call>', [ONE, ("g", {})]),
        ('<tool_call>{"name": "g"}</tool_call> <tool_call>[{"name": "h"}]</tool_call>', [("g", {}), ("h", {})]),
        ('<think>perhaps <tool_call>?</think>\n[{"name": "f", "arguments": {"a": 1}}]', [ONE]),
        ('```json\n[{"name": "f", "arguments": {"a": 1}}]\n```', [ONE]),
        ('{"name": "f", "arguments": {"a": 1}}', [ONE]),
        ("[f(a=1), m.g()]", [ONE, ("m.g", {})]),
        ("f(a=1)", [ONE]),
        ("```python\n[f(a=1)]\n```", [ONE]),
        ('````json\r\n[{"name": "f",\r\n"arguments": {"a": 1}}]\r\n````\r\n', [ONE]),
        ("```tool_call\n[f(a=1)]\n```", [ONE]),
        ("```python\n[f(a=1)]\n```\nThat is it.", []),
        ("[f(a=-1.5, b='x', c=[True, None], d=(1, 2), e={'k': [1]})]", [
            ("f", {"a": -1.5, "b": "x", "c": [True, None], "d": (1, 2), "e": {"k": [1]}})
        ]),
        ("[f(a=x, b=1+1, c=g(2))]", [("f", {"a": "x", "b": "1 + 1", "c": "g(2)"})]),  # never computed
        # no calls
        ("No function fits.", []),
        ("", []),
        ("[]", []),
        ("[1, 2]", []),
        ("[f(1)]", []),
        ("[f(**{'a': 1})]", []),
        ("f", []),
        ("(lambda: 1)(a=2)", []),
        ("[f(a={[]: 1})]", []),
        ("[f(a={'k': 1, **m})]", [("f", {"a": "{'k': 1, **m}"})]),
        ("I would call f(a=1) here.", []),
        ("(" * 10_000 + "f()" + ")" * 10_000, []),
        ("[" * 10_000, []),
        ("-" * 20_000 + "1", []),
        ("f(a='" + "x" * MAX_LENGTH + "')", []),
    ],
)  # fmt: skip
def test_parse_calls(reply: str, calls: list[Any]) -> None:
    assert parse_calls(reply) == calls


@pytest.mark.parametrize(
    "inside",
    [
        "",
        " \n",
        "{",
        '{"name": 1}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        "f(a=1)",
        "[" * 10_000,
        "x" * MAX_LENGTH,
    ],
)
def test_malformed_tool_calls(inside: str) -> None:
    with pytest.raises(CallParseError):
        parse_calls(f"<tool_call>{inside}</tool_call>")
    with pytest.raises(CallParseError):
        parse_calls(f'<tool_call>{{"name": "f"}}</tool_call><tool_call>{inside}')  # cut off


# -- The reward --------------------------------------------------------------------------------------------------------


PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "scale": {"type": "float"},
    "tags": {"type": "array", "items": {"type": "string"}},
}
FUNCTION = [{"name": "w.get", "parameters": {"type": "dict", "properties": PROPERTIES, "required": ["city"]}}]
GOLD = [{"w.get": {"city": ["New York, NY", "NYC"], "days": [3, ""], "scale": [1.0, ""], "tags": [["a b", "c"], ""]}}]
OTHER = [{"w.get": {"city": ["Rome"]}}]


def judged(reply: str, gold: Any = GOLD, category: str = "simple_python", **message: Any) -> dict[str, float | None]:
    task = task_of(function=FUNCTION, ground_truth=gold, category=category)
    result = scored("bfcl", task, episode_of(task, reply, **message))
    return {name.removeprefix("bfcl").removeprefix("/") or "reward": value for name, value in result.items()}


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("[w.get(city='NYC')]", True),
        ("[w.get(city='new-york NY', days=3, scale=1, tags=['A_B', 'c'])]", True),  # signs, case; 1 for 1.0
        ('<tool_call>{"name": "w.get", "arguments": {"city": "NYC", "days": 3}}</tool_call>', True),
        ("[w.get(city='Boston')]", False),
        ("[w.get(days=3)]", False),  # required
        ("[w.get(city='NYC', wind=1)]", False),  # unknown
        ("[w.get(city='NYC', days=4)]", False),
        ("[w.get(city='NYC', days='3')]", False),
        ("[w.get(city='NYC', days=3.0)]", False),
        ("[w.get(city='NYC', days=True)]", False),
        ("[w.get(city='NYC', tags=['c', 'a b'])]", False),
        ("[w.get(city='NYC', tags='a b')]", False),
        ("[w.got(city='NYC')]", False),
        ("[w.get(city='NYC'), w.get(city='NYC')]", False),
        ("New York", False),
        ("<tool_call>{</tool_call>", False),
    ],
)
def test_one_call(reply: str, right: bool) -> None:
    assert judged(reply)["reward"] == float(right)


def test_several_calls_in_any_order() -> None:
    both = GOLD + OTHER
    right = {"reward": 1, "calls": 2, "matched": 1}
    assert judged("[w.get(city='Rome'), w.get(city='NYC')]", both, "parallel") == right
    assert judged("[w.get(city='Rome')]", both, "parallel") == {"reward": 0, "calls": 1, "matched": 0.5}
    assert judged("[w.get(city='Rome'), w.get(city='Rome')]", both, "parallel")["reward"] == 0
    assert judged("[w.get(city='Rome'), w.get(city='NYC'), w.get(city='NYC')]", both, "parallel")["reward"] == 0


@pytest.mark.parametrize(
    ("reply", "irrelevance", "relevance"),
    [
        ("I cannot do that.", 1, 0),
        ("<think>f() will not do.</think> I cannot do that.", 1, 0),
        ("[w.get(city='Rome')]", 0, 1),
        ("[any()]", 0, 1),
        ('<tool_call>{"name": "w.get", "arguments": {}}</tool_call>', 0, 1),
        # not a call that can be read, and not a refusal
        ("<tool_call>", 0, 0),
        ("<tool_call></tool_call>", 0, 0),
        ("<tool_call>{</tool_call>", 0, 0),
        ("<tool_call>{}</tool_call>", 0, 0),
        ('<tool_call>{"name": ""}</tool_call>', 0, 0),
        ('<tool_call>{"name": "w.get"}</tool_call><tool_call>', 0, 0),
        ("", 0, 0),
        ("<think>Hm.</think>\n", 0, 0),
    ],
)
def test_relevance(reply: str, irrelevance: float, relevance: float) -> None:
    assert judged(reply, [], "live_irrelevance")["reward"] == irrelevance
    assert judged(reply, [], "live_relevance")["reward"] == relevance


def test_relevance_of_calls_that_the_episode_made() -> None:
    made = [{"function": {"name": "w.get", "arguments": "{}"}}]
    listed = [{"function": {"name": "w.get", "arguments": "[1]"}}]
    for calls, right in (
        (made, 1),
        ([{"function": {"name": "w.get", "arguments": "{"}}], 0),
        (listed, 0),
        ([{"name": 5}], 0),
    ):
        assert judged("Here you are.", [], "live_relevance", tool_calls=calls)["reward"] == right
        assert judged("Here you are.", [], "live_irrelevance", tool_calls=calls)["reward"] == 0


def test_calls_of_the_episode_take_precedence() -> None:
    made = [{"function": {"name": "w.get", "arguments": '{"city": "NYC"}'}}]
    assert judged("Here you are.", tool_calls=made)["reward"] == 1
    assert judged("[w.get(city='NYC')]", tool_calls=[{"name": "w.get", "arguments": {"city": "Rome"}}])["reward"] == 0
    assert judged("Here you are.", tool_calls=[{"name": "w.get", "arguments": "{"}])["reward"] == 0
    assert judged("Here you are.", [], "irrelevance", tool_calls=made)["reward"] == 0


def test_a_parameter_that_is_described_but_not_expected() -> None:
    assert judged("[w.get(city='Rome', days=3)]", OTHER)["reward"] == 0
    assert judged("[w.get(city='Rome')]", OTHER)["reward"] == 1


def test_columns_may_be_json_text() -> None:
    task = task_of(function=json.dumps(FUNCTION), ground_truth=json.dumps(GOLD), category="simple")
    assert scored("bfcl", task, episode_of(task, "[w.get(city='NYC')]"))["bfcl"] == 1


@pytest.mark.parametrize(
    ("kind", "acceptable", "right", "wrong"),
    [
        ({"type": "float"}, [2.5, 3], [2.5, 3, 3.0], [2, "2.5", None]),
        ({"type": "boolean"}, [True], [True], [False, 1, "True"]),
        ({"type": "integer"}, [1], [1], [True, 1.0, 2]),
        ({"type": "string"}, ["It's", ""], ['it"s', " IT'S ", ""], ["its", 1]),
        ({"type": "any"}, ["", 5], [5], [6]),  # "" only says that it may be left out
        ({"type": "any"}, [5], [5], [6, "5"]),  # of the type that the ground truth has
        ({"type": "string"}, [None, "x"], [None], ["y"]),
        ({"type": "tuple", "items": {"type": "float"}}, [[1.0, 2.0]], [[1.0, 2.0], (1.0, 2.0)], [[1, 2], [2.0, 1.0]]),
        ({"type": "array", "items": {"type": "integer"}}, [[1, 2], []], [[1, 2], []], [[1], (1, 2), [1, True]]),
        (
            {"type": "dict"},
            [{"a": ["X Y"], "b": [1, 2, ""]}],
            [{"a": "xy"}, {"a": "x-y", "b": 2}],
            [{"b": 2}, {"a": "xy", "b": 3}, {"a": "xy", "c": 1}, {"a": ["xy"]}, "a"],
        ),
        (
            {"type": "array", "items": {"type": "dict"}},
            [[{"a": [1]}, {"a": [2]}]],
            [[{"a": 1}, {"a": 2}]],
            [[{"a": 2}, {"a": 1}], [{"a": 1}], [1, 2], [{"a": 1}, {"a": 2}, {"a": 2}]],
        ),
    ],
)
def test_values(kind: dict[str, Any], acceptable: list[Any], right: list[Any], wrong: list[Any]) -> None:
    assert [value for value in right if not accepts(value, acceptable, kind)] == []
    assert [value for value in wrong if accepts(value, acceptable, kind)] == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"category": "simple_java"}, "only calls of Python functions"),
        ({"category": "simple_javascript"}, "only calls of Python functions"),
        ({"category": "simple", "ground_truth": []}, "ground_truth is empty"),
        ({"category": "simple", "ground_truth": [{"g": {}}]}, "calls g, which `function` does not describe"),
    ],
)
def test_data_that_cannot_be_judged(columns: dict[str, Any], message: str) -> None:
    task = task_of(**{"function": FUNCTION, "ground_truth": GOLD, **columns})
    with pytest.raises(InputError, match=f"task t: .*{message}"):
        scored("bfcl", task, episode_of(task, ""))
