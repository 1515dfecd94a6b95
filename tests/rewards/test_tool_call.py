"""tool_call and rlla (ToolRL), computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.errors import InputError
from covey.types import ToolUse
from tests.rewards.replies import episode_of, score, scored, task_of

# -- tool_call ---------------------------------------------------------------------------------------------------------


SEARCH = {"name": "search", "arguments": {"query": "cats", "top_k": 3}}
ADD = {"name": "add", "arguments": {"a": 1, "b": [2, 3]}}


def used(*calls: str | dict[str, Any], error: str | None = None) -> tuple[ToolUse, ...]:
    full = [{"name": call, "arguments": None} if isinstance(call, str) else call for call in calls]
    return tuple(ToolUse(call["name"], 0.1, error, arguments=call["arguments"]) for call in full)


def calls(
    tools: tuple[ToolUse, ...], gold: Any = None, messages: Sequence[Any] = (), **options: Any
) -> dict[str, float | None]:
    task = task_of() if gold is None else task_of(tool_calls=gold)
    result = scored("tool_call", task, episode_of(task, "", tools=tools, tool_calls=messages), **options)
    return {name.removeprefix("tool_call").removeprefix("/") or "reward": value for name, value in result.items()}


def test_without_gold_every_call_must_succeed_and_there_must_be_one() -> None:
    assert calls(used("search", "add")) == {"reward": 1, "calls": 2, "errors": 0}
    assert calls((*used("search"), *used("add", error="bad_arguments"))) == {"reward": 0, "calls": 2, "errors": 1}
    assert calls(()) == {"reward": 0, "calls": 0, "errors": 0}
    assert calls(used("answer")) == {"reward": 0, "calls": 0, "errors": 0}
    assert calls(used("answer"), ignore=[])["reward"] == 1


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
    for tools in ((), used(*made)) if all("name" in call and call["arguments"] != "{a: 1" for call in made) else ((),):
        result = calls(tools, gold, () if tools else made)  # of a program at the gateway, and of an agent
        assert (result["matched"], result["reward"]) == (pytest.approx(matched), float(matched == 1))
        assert calls(tools, gold, () if tools else made, partial=True)["reward"] == pytest.approx(matched)


def test_failed_and_malformed_calls_count_as_wrong() -> None:
    assert calls(used(SEARCH, error="raised"), [SEARCH])["reward"] == 0
    # Two attempts, one of which was not even a call: half is right.
    mixed = (*used(SEARCH), *used("?", error="malformed"))
    assert calls(mixed, [SEARCH], partial=True)["reward"] == 0.5


def test_the_answer_tool_counts_only_if_the_column_lists_it() -> None:
    final = {"name": "answer", "arguments": {"text": "4"}}
    assert calls(used(SEARCH, final), [SEARCH])["reward"] == 1
    assert calls(used(SEARCH, final), [SEARCH, final])["reward"] == 1
    assert calls(used(SEARCH), [SEARCH, final])["reward"] == 0


def test_gold_calls_that_cannot_be_read_are_a_mistake_in_the_data() -> None:
    for gold in ("search", [{"tool": "search"}], ["search"]):
        with pytest.raises(InputError, match=r"task t: .*\n  fix: column tool_calls is a list"):
            calls((), gold)


# -- rlla --------------------------------------------------------------------------------------------------------------


CALL = '{"name": "get", "parameters": {"city": "Rome", "days": 3}}'
GOLD = f"<think> so </think>\n<tool_call>\n{CALL}\n</tool_call>"
TALK = "<think> so </think>\n<response> Hello </response>"


def reply(*calls: str, think: str = "<think>x</think>\n") -> str:
    return f"{think}<tool_call>\n" + "\n".join(calls) + "\n</tool_call>"


def rlla(gold: str, text: str) -> tuple[float, float]:
    result = score("rlla", text, gold)
    assert result["rlla"] == result["rlla/format"] + result["rlla/correctness"]  # type: ignore[operator]
    return result["rlla/format"], result["rlla/correctness"]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("text", "points"),  # of 4: 1 for the names, 1 for the parameters' names, 2 for their values
    [
        (reply(CALL), 4),
        (reply('{"name": "get", "parameters": {"days": 3, "city": "Rome"}}'), 4),
        (reply('{"name": "get", "parameters": {"city": "Rome", "days": 4}}'), 3),
        (reply('{"name": "get", "parameters": {"city": "Rome"}}'), 1 + 1 / 2 + 1),
        (reply('{"name": "get", "parameters": {"city": "Rome", "days": 3, "wind": 1}}'), 1 + 2 / 3 + 2),
        (reply('{"name": "put", "parameters": {"city": "Rome", "days": 3}}'), 0),
        (reply(CALL, CALL), 1 / 2 + 3),  # one name too many
        (reply('{"name": "get", "parameters": {"city": "Oslo", "days": 1}}', CALL), 1 / 2 + 3),  # the better of the two
        (reply('{"name": "get", "parameters": {}}'), 1),
        (reply('{"name": "get"}'), 0),
        (reply('{"name": 5, "parameters": {}}'), 0),
        (reply("[]"), 0),
        (reply("[" * 5000), 0),
        (reply("no JSON"), 0),
        ("", 0),
        (TALK, 0),
    ],
)
def test_calls(text: str, points: float) -> None:
    assert rlla(GOLD, text)[1] == pytest.approx(6 * points / 4 - 3)


def test_two_calls_of_one_tool_are_paired_once() -> None:
    other = CALL.replace("Rome", "Oslo")
    gold = reply(CALL, other)
    assert rlla(gold, reply(other, CALL))[1] == pytest.approx(3)
    # Of 7 points: names 2/2, then both gold calls meet calls for Rome: the second one has the wrong city.
    assert rlla(gold, reply(CALL, CALL))[1] == pytest.approx(6 * (1 + 3 + 2) / 7 - 3)
    assert rlla(gold, reply(CALL))[1] == pytest.approx(6 * (1 / 2 + 3) / 7 - 3)


@pytest.mark.parametrize(
    ("gold", "text", "form"),
    [
        (GOLD, reply(CALL), 1),
        (GOLD, " " + reply(CALL) + "\n", 1),
        (GOLD, reply(CALL, think=""), 0),
        (GOLD, reply(CALL, think="<think>x</think>"), 0),  # on one line
        (GOLD, reply(CALL) + "\n<response>x</response>", 0),
        (GOLD, reply(CALL) + "\n" + reply(CALL, think=""), 0),
        (TALK, TALK, 1),
        (TALK, reply(CALL), 0),
        (f"{GOLD}\n<response> Hi </response>", f"{reply(CALL)}\n<response>x</response>", 1),
        (f"{GOLD}\n<response> Hi </response>", f"<think>x</think>\n<response>x</response>\n{reply(CALL, think='')}", 0),
        ("<think>only</think>", "<think>x</think>", 1),
    ],
)
def test_format(gold: str, text: str, form: float) -> None:
    assert rlla(gold, text)[0] == form


def test_without_gold_calls_only_the_format_counts() -> None:
    assert score("rlla", TALK, TALK) == {"rlla": 1, "rlla/format": 1, "rlla/correctness": 0}
    assert score("rlla", reply(CALL), TALK)["rlla"] == 0


def test_gold_that_cannot_be_read_is_a_mistake_in_the_data() -> None:
    for gold in ("<tool_call>\n{\n</tool_call>", "<tool_call>\n" + CALL):
        with pytest.raises(InputError, match=r"task t: .*cannot be read"):
            score("rlla", "x", gold)


def test_every_gold_answer_of_the_public_rows(shared: Path) -> None:
    import pyarrow.parquet as parquet

    rows = parquet.read_table(shared / "data" / "tools" / "rlla_4k.test.parquet").to_pylist()
    golds = [row["reward_model"]["ground_truth"] for row in rows]
    assert len(golds) == 80
    assert [rlla(gold, gold) for gold in golds] == [(1, 3 if "<tool_call>" in gold else 0) for gold in golds]
