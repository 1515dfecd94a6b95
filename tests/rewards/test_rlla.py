"""ToolRL's reward, computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.errors import InputError
from tests.rewards.replies import score

CALL = '{"name": "get", "parameters": {"city": "Rome", "days": 3}}'
GOLD = f"<think> so </think>\n<tool_call>\n{CALL}\n</tool_call>"
TALK = "<think> so </think>\n<response> Hello </response>"


def reply(*calls: str, think: str = "<think>x</think>\n") -> str:
    return f"{think}<tool_call>\n" + "\n".join(calls) + "\n</tool_call>"


def rlla(gold: str, said: str) -> tuple[float, float]:
    found = score("rlla", said, gold)
    assert found["rlla"] == found["rlla/format"] + found["rlla/correctness"]  # type: ignore[operator]
    return found["rlla/format"], found["rlla/correctness"]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("said", "points"),  # of 4: 1 for the names, 1 for the parameters' names, 2 for their values
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
def test_calls(said: str, points: float) -> None:
    assert rlla(GOLD, said)[1] == pytest.approx(6 * points / 4 - 3)


def test_two_calls_of_one_tool_are_paired_once() -> None:
    other = CALL.replace("Rome", "Oslo")
    gold = reply(CALL, other)
    assert rlla(gold, reply(other, CALL))[1] == pytest.approx(3)
    # Of 7 points: names 2/2, then both gold calls meet calls for Rome: the second one has the wrong city.
    assert rlla(gold, reply(CALL, CALL))[1] == pytest.approx(6 * (1 + 3 + 2) / 7 - 3)
    assert rlla(gold, reply(CALL))[1] == pytest.approx(6 * (1 / 2 + 3) / 7 - 3)


@pytest.mark.parametrize(
    ("gold", "said", "form"),
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
def test_form(gold: str, said: str, form: float) -> None:
    assert rlla(gold, said)[0] == form


def test_without_gold_calls_only_the_form_is_paid() -> None:
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
