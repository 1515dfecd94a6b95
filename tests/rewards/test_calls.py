"""Calls as models write them, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from covey.rewards.bfcl import MAX_LENGTH, CallParseError, parse_calls

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
def test_parse_calls_replies(reply: str, calls: list[Any]) -> None:
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
def test_a_tool_call_that_cannot_be_read(inside: str) -> None:
    with pytest.raises(CallParseError):
        parse_calls(f"<tool_call>{inside}</tool_call>")
    with pytest.raises(CallParseError):
        parse_calls(f'<tool_call>{{"name": "f"}}</tool_call><tool_call>{inside}')  # cut off
