"""Instructions that a program can verify: each kind followed and not followed, by hand."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.errors import Absent, InputError
from covey.imports import install_extra
from covey.rewards import RewardError, resolve_rewards
from covey.rewards.ifeval import DETECTING, KINDS, capital_words, count_sentences, count_words, loose_variants
from covey.types import StopReason, Task, Turn
from tests.rewards.ifeval_cases import CASES
from tests.rewards.replies import episode_of, scored, task_of

LANGDETECT = importlib.util.find_spec("langdetect") is not None
NEEDS_LANGDETECT = pytest.mark.skipif(not LANGDETECT, reason="langdetect is not installed (covey[ifeval])")


def judged(reply: str, kinds: list[str], settings: list[Any], **options: Any) -> dict[str, Any]:
    task = task_of(instruction_id_list=kinds, kwargs=settings)
    result = scored("ifeval", task, episode_of(task, reply), **options)
    return {name.removeprefix("ifeval").removeprefix("/") or "reward": value for name, value in result.items()}


def test_all_kinds_have_examples() -> None:
    assert len(KINDS) == 25
    assert {case[0] for case in CASES} == set(KINDS)
    for kind in KINDS:
        right, wrong = ([reply for case in CASES if case[0] == kind for reply in case[side]] for side in (2, 3))
        assert len(right) >= 2 <= len(wrong), kind


@pytest.mark.parametrize(("kind", "settings", "right", "wrong"), CASES, ids=[case[0] for case in CASES])
def test_each_kind(kind: str, settings: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    if kind in DETECTING and not LANGDETECT:
        pytest.skip("langdetect is not installed (covey[ifeval])")
    for reply in right:
        assert judged(reply, [kind], [settings])["reward"] == 1, reply
    for reply in wrong:
        assert judged(reply, [kind], [settings])["reward"] == 0, reply


def test_the_four_scores() -> None:
    kinds = ["punctuation:no_comma", "startend:quotation"]
    one = judged("no comma here", kinds, [{}, {}])
    assert one == {
        "reward": 0.5,
        "instruction_strict": 0.5,
        "instruction_loose": 0.5,
        "prompt_strict": 0,
        "prompt_loose": 0,
    }
    # Without its first line the reply follows both; as it stands it follows neither.
    two = judged('Sure, here you are:\n"no comma"', kinds, [{}, {}], score="prompt_loose")
    assert two == {
        "reward": 1,
        "instruction_strict": 0,
        "instruction_loose": 1,
        "prompt_strict": 0,
        "prompt_loose": 1,
    }
    assert judged("", kinds, [{}, {}])["instruction_loose"] == 0  # an empty reply follows nothing
    with pytest.raises(RewardError, match="score is one of"):
        judged("x", kinds, [{}, {}], score="strict")


def composite(reply: str, stop: str = "eos", **options: Any) -> dict[str, Any]:
    task = task_of(instruction_id_list=["punctuation:no_comma", "startend:quotation"], kwargs=[{}, {}])
    turn = Turn((1,), (2,), (0.0,), (0,), StopReason(stop))
    episode = replace(episode_of(task, reply), turns=(turn,))
    result = scored("ifeval_composite", task, episode, **options)
    return {name.removeprefix("ifeval_composite").removeprefix("/") or "reward": v for name, v in result.items()}


@pytest.mark.parametrize(
    ("reply", "stop", "value"),
    [
        ('<think>so</think><answer>"a"</answer>', "eos", 2.2),  # all of it
        ('<think>so</think><answer>"a"</answer>', "length", 2.0),
        ('<answer>"a"</answer>', "eos", 1.7),
        ("<think>so</think><answer>a</answer>", "eos", 0.3 * 0.5 + 0.1 * 0.5 + 1.2),  # one of two instructions
        ('<think>so</think><answer>Sure, here:\n"a"</answer>', "eos", 0.2 + 0.1 + 1.2),  # forgiven: loose only
        ('<think>a</think><think>b</think><answer>"a"</answer>', "eos", 1.7),
        ('<think>a</think><answer>"a"</answer><answer>b, c</answer>', "eos", 1.7),  # the first is judged
        ('"a"', "eos", 0.2),  # what stands in no <answer> follows nothing
        ("", "length", 0.0),
    ],
)
def test_the_composite_reward(reply: str, stop: str, value: float) -> None:
    assert composite(reply, stop)["reward"] == pytest.approx(value)


def test_parts_and_weights_of_the_composite_reward() -> None:
    assert composite("<answer>a</answer>") == {
        **{"reward": pytest.approx(0.9), "instruction_strict": 0.5, "instruction_loose": 0.5},
        **{"prompt_strict": 0, "prompt_loose": 0, "structure": 0.5, "complete": 1},
    }
    assert composite("<answer>a</answer>", weights=[0, 1, 0, 0])["reward"] == pytest.approx(0.5 + 0.5 + 0.2)
    with pytest.raises(RewardError, match="weights are 4 numbers, for prompt_strict"):
        composite("a", weights=[1.0])


def test_loose_variants() -> None:
    assert loose_variants("a\n*b*\nc") == ["a\n*b*\nc", "a\nb\nc", "*b*\nc", "b\nc", "a\n*b*", "a\nb", "*b*", "b"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three? Four", 4),
        ("Dr. Smith met Mr. Jones. They left.", 2),
        ("It costs 3.50 dollars. Really?!", 2),
        ('He said "Stop." Then he left.', 2),
        ("He lives in the U.S. The end.", 2),
        ("Wait... what? Yes… No", 3),
        ("1. First item.\n2. Second item.", 4),  # Punkt takes the number of an item for a sentence
        ("1. first item\n2. second item", 1),
        ("J. R. Tolkien wrote it", 1),
        ("no end", 1),
        ("Hi!!! there", 2),
        ("visit example.com today", 1),
        ("lower. case goes on", 2),
        ("", 0),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count


@pytest.mark.parametrize("row", ["." * 100_000, "!" * 100_000, "?." * 50_000, "…!" * 50_000, "!" * 1000 + '"' * 99_000])
def test_long_runs_of_marks_are_scanned_once(row: str) -> None:
    """Tried from each of its marks on, this would not end."""
    assert count_sentences(f"One {row}and so. Two{row} Three") == 3


def test_words_and_capitals() -> None:
    assert count_words("It's a well-known fact: 3.5_a") == 8  # It s a well known fact 3 5_a
    assert capital_words("I DON'T know, it IS the U.S. (NASA's) A-B 3D iPhone CANNOT") == 10
    assert capital_words("I DO N'T IS U.S. NASA A-B 3D CAN NOT") == 10  # the same, already parted


def test_every_instruction_of_the_public_data_is_understood(shared: Path) -> None:
    rows = [json.loads(line) for line in (shared / "data" / "ifeval" / "input_data.jsonl").open()]
    every = sorted({name for row in rows for given in row["kwargs"] for name in given})
    rewards, kinds = resolve_rewards("ifeval", None, {}), set()
    for row in rows:
        # As a table holds them: every row has the settings of all kinds, null where they are not its own.
        kwargs = [{name: given.get(name) for name in every} for given in row["kwargs"]]
        listed = [k for k in row["instruction_id_list"] if LANGDETECT or k not in DETECTING]
        kept = [g for k, g in zip(row["instruction_id_list"], kwargs, strict=True) if k in listed]
        kinds |= set(row["instruction_id_list"])
        if listed:
            task = Task(str(row["key"]), ({"role": "user", "content": row["prompt"]},), None, {})
            task = Task(task.id, task.messages, None, {"instruction_id_list": listed, "kwargs": kept})
            rewards.check(task)
            assert 0 <= (scored("ifeval", task, episode_of(task, row["prompt"]))["ifeval"] or 0) <= 1
    assert kinds == set(KINDS)
    assert len(rows) == 541


@pytest.mark.parametrize(
    ("kinds", "settings", "message"),
    [
        (["punctuation:no_coma"], [{}], "task t: unknown instruction of IFEval  punctuation:no_coma\n  did you mean"),
        (["startend:quotation"], [], "task t: 1 instructions in instruction_id_list, 0 in kwargs"),
        (["startend:end_checker"], [{}], "kwargs of startend:end_checker must give end_phrase; they give nothing"),
        (["startend:quotation"], [{"n": 1}], "kwargs of startend:quotation must give nothing; they give n"),
        ([], [], "there is nothing to follow"),
    ],
)
def test_data_that_cannot_be_judged_stops_before_training(kinds: list[str], settings: list[Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        judged("x", kinds, settings)
    assert message in str(caught.value)


def test_a_missing_package_is_reported_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Absent, match=re.escape(install_extra("ifeval"))):
        judged("x", ["language:response_language"], [{"language": "de"}])
    assert judged("x", ["punctuation:no_comma"], [{}])["reward"] == 1


@NEEDS_LANGDETECT
def test_a_language_is_always_detected_the_same() -> None:
    mixed = "hello monde this est a mixed satz mit words"
    first = judged(mixed, ["language:response_language"], [{"language": "en"}])
    assert all(judged(mixed, ["language:response_language"], [{"language": "en"}]) == first for _ in range(20))
