"""Tool calls, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from covey.errors import InputError
from covey.types import ToolUse
from tests.rewards.replies import episode_of, scored, task_of

SEARCH = {"name": "search", "arguments": {"query": "cats", "top_k": 3}}
ADD = {"name": "add", "arguments": {"a": 1, "b": [2, 3]}}


def used(*names: str, error: str | None = None) -> tuple[ToolUse, ...]:
    return tuple(ToolUse(name, 0.1, error) for name in names)


def calls(tools: tuple[ToolUse, ...], made: list[Any], gold: Any = None, **options: Any) -> dict[str, float | None]:
    task = task_of() if gold is None else task_of(tool_calls=gold)
    found = scored("tool_call", task, episode_of(task, "", tools=tools, tool_calls=made), **options)
    return {name.removeprefix("tool_call").removeprefix("/") or "reward": value for name, value in found.items()}


def test_without_gold_every_call_must_succeed_and_there_must_be_one() -> None:
    assert calls(used("search", "add"), []) == {"reward": 1, "calls": 2, "errors": 0}
    assert calls((*used("search"), *used("add", error="bad_arguments")), []) == {"reward": 0, "calls": 2, "errors": 1}
    assert calls((), []) == {"reward": 0, "calls": 0, "errors": 0}
    assert calls(used("answer"), []) == {"reward": 0, "calls": 0, "errors": 0}
    assert calls(used("answer"), [], ignore=[])["reward"] == 1


@pytest.mark.parametrize(
    ("made", "gold", "matched"),
    [
        ([SEARCH, ADD], [ADD, SEARCH], 1),
        ([{"function": {"name": "add", "arguments": '{"b": [2.0, 3], "a": 1}'}}], [ADD], 1),  # as OpenAI writes it
        ([{"name": "search", "arguments": {"query": " cats ", "top_k": 3}}], [SEARCH], 1),
        ([SEARCH], [SEARCH, ADD], 0.5),
        ([SEARCH, ADD], [SEARCH], 0.5),
        ([SEARCH, SEARCH], [SEARCH, ADD], 0.5),  # one call meets one gold call
        ([{"name": "search", "arguments": {"query": "cats"}}], [SEARCH], 0),
        ([{"name": "find", "arguments": SEARCH["arguments"]}], [SEARCH], 0),
        ([{"name": "add", "arguments": {"a": True, "b": [2, 3]}}], [ADD], 0),  # true is not 1
        ([{"name": "add", "arguments": {"a": 1, "b": [3, 2]}}], [ADD], 0),
        ([{"name": "f", "arguments": {"a": True}}], [{"name": "f", "arguments": {"a": True}}], 1),
        ([{"name": "f", "arguments": {"a": 1}}], [{"name": "f", "arguments": {"a": "1"}}], 0),
        ([{"name": "f", "arguments": {"a": "x"}}], [{"name": "f", "arguments": {"a": {"x": 1}}}], 0),
        ([{"name": "add", "arguments": "{a: 1"}], [ADD], 0),
        ([], [], 1),
        ([SEARCH], [], 0),
        ([], [SEARCH], 0),
    ],
)
def test_against_gold_calls(made: list[Any], gold: list[Any], matched: float) -> None:
    tools = used(*["any"] * len(made))
    found = calls(tools, made, gold)
    assert (found["matched"], found["reward"]) == (pytest.approx(matched), float(matched == 1))
    assert calls(tools, made, gold, partial=True)["reward"] == pytest.approx(matched)


def test_a_right_call_that_failed_earns_nothing_and_one_nobody_could_read_counts_as_wrong() -> None:
    assert calls(used("search", error="raised"), [SEARCH], [SEARCH])["reward"] == 0
    # Two attempts, one of which was not even a call: half is right.
    mixed = (*used("search"), *used("?", error="malformed"))
    assert calls(mixed, [SEARCH], [SEARCH], partial=True)["reward"] == 0.5


def test_the_answer_tool_counts_only_where_it_is_asked_for() -> None:
    final = {"name": "answer", "arguments": {"text": "4"}}
    assert calls(used("search", "answer"), [SEARCH, final], [SEARCH])["reward"] == 1
    assert calls(used("search", "answer"), [SEARCH, final], [SEARCH, final])["reward"] == 1
    assert calls(used("search"), [SEARCH], [SEARCH, final])["reward"] == 0


def test_gold_calls_that_cannot_be_read_are_a_mistake_in_the_data() -> None:
    for gold in ("search", [{"tool": "search"}], ["search"]):
        with pytest.raises(InputError, match=r"task t: .*\n  fix: column tool_calls is a list"):
            calls((), [], gold)
