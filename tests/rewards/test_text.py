"""Rewards for short answers, length and repetition. QA is compared with the official formulas, written out again."""

from __future__ import annotations

import json
import random
import re
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from covey.errors import InputError
from covey.rewards import RewardError
from tests.rewards.replies import episode_of, score, scored, task_of

# -- Question answering ------------------------------------------------------------------------------------------------


NAMES = ("em", "f1", "precision", "recall")


def official(prediction: str, gold: str) -> tuple[float, float, float, float]:
    """HotpotQA's evaluation, step by step."""

    def normalise(text: str) -> str:
        kept = [letter for letter in text.lower() if letter not in set(string.punctuation)]
        return " ".join(word for word in re.split(r"\s+", "".join(kept)) if word not in ("a", "an", "the", ""))

    a, b = normalise(prediction), normalise(gold)
    em = float(a == b)
    if a != b and (a in ("yes", "no", "noanswer") or b in ("yes", "no", "noanswer")):
        return em, 0.0, 0.0, 0.0
    same = sum(min(a.split().count(token), b.split().count(token)) for token in set(a.split()))
    if not same:
        return em, 0.0, 0.0, 0.0
    precision, recall = same / len(a.split()), same / len(b.split())
    return em, 2 * precision * recall / (precision + recall), precision, recall


def extras(result: dict[str, Any], name: str = "qa_f1_reward") -> tuple[float, ...]:
    return tuple(result[f"{name}/{key}"] for key in NAMES)


@pytest.mark.parametrize(
    ("reply", "answer", "f1", "em"),
    [
        ("Paris", "Paris", 1, 1),
        ("the  Eiffel-Tower!", "Eiffel Tower", 0, 0),  # punctuation is taken out, not replaced
        ("The Eiffel Tower.", "eiffel tower", 1, 1),
        ("Paris, France", "Paris", 2 / 3, 0),
        ("yes", "no", 0, 0),
        ("yes it is", "yes", 0, 0),  # part of a yes does not count
        ("Yes.", "yes", 1, 1),
        ("no", "no way", 0, 0),
        ("", "Paris", 0, 0),
        ("", "", 1, 1),  # a question without an answer
        ("Paris", "", 0, 0),
        ("to be or not to be", "to be", 2 * (2 / 6) / (2 / 6 + 1), 0),
        ("Berlin", ["Paris", "Berlin"], 1, 1),
        ("big Berlin", ["Paris", "Berlin", "huge big Berlin"], 0.8, 0),
        (1969, 1969, 1, 1),
        ("I think so.\nAnswer: Paris", "Paris", 1, 1),
        ("Thought: hm\n**Final Answer:** Paris\nThat is all.", "Paris", 1, 1),
        ("Answer:\n\nParis", "Paris", 1, 1),
        ("Answer: Rome\nNo. Answer: Paris", "Paris", 1, 1),
        ("<answer>Rome</answer> or rather <answer> Paris </answer>, Answer: Rome", "Paris", 1, 1),
        ("<answer></answer>", "Paris", 0, 0),
    ],
)
def test_by_hand(reply: Any, answer: Any, f1: float, em: float) -> None:
    result = score("qa_f1_reward", str(reply), answer)
    assert result["qa_f1_reward"] == result["qa_f1_reward/f1"] == pytest.approx(f1)
    assert result["qa_f1_reward/em"] == em
    assert score("qa_em_reward", str(reply), answer)["qa_em_reward"] == em


def test_as_the_official_formulas_say() -> None:
    draw = random.Random(0)
    words = [
        "the",
        "a",
        "An",
        "red",
        "Red,",
        "green",
        "blue",
        "yes",
        "no",
        "noanswer",
        "U.S.",
        "1,000",
        "well-known",
        "'",
    ]
    for _ in range(500):
        reply, gold = (" ".join(draw.choices(words, k=draw.randint(1, 4))) for _ in range(2))
        expected = official(reply, gold)
        if official(gold, gold)[1]:  # an empty gold answer is SQuAD 2's business
            assert extras(score("qa_f1_reward", reply, gold)) == pytest.approx(expected), (reply, gold)


def test_a_column_of_answers_and_its_absence() -> None:
    assert score("qa_em_reward", "b", answers=["a", "b"])["qa_em_reward"] == 1
    with pytest.raises(InputError, match="no gold answer"):
        score("qa_em_reward", "b", gold="b")
    with pytest.raises(InputError, match="no gold answer"):
        score("qa_em_reward", "b", answers=[])


def test_answers_as_squad_has_them() -> None:
    table = {"text": ["Paris", "in Paris"], "answer_start": [3, 0]}
    assert score("qa_em_reward", "Paris", answers=table)["qa_em_reward"] == 1
    assert score("qa_em_reward", "in Paris", table)["qa_em_reward"] == 1
    assert score("qa_em_reward", "text Paris", answers=table)["qa_em_reward"] == 0
    none = {"text": [], "answer_start": []}
    assert score("qa_f1_reward", "", answers=none)["qa_f1_reward"] == 1
    assert score("qa_f1_reward", "Paris", answers=none)["qa_f1_reward"] == 0
    for odd in ({"value": "Paris", "aliases": ["Paris"]}, {"text": 5}):
        with pytest.raises(InputError, match=r"task t: .* cannot read its gold answer, a table with the keys"):
            score("qa_em_reward", "Paris", answers=odd)


def test_gold_answers_of_real_questions_earn_all(shared: Path) -> None:
    rows = [json.loads(line) for line in (shared / "data" / "qa" / "questions.jsonl").open()]
    kinds: Counter[str] = Counter()
    for row in rows[:: len(rows) // 300]:
        result = score("qa_f1_reward", f"Answer: {row['answers'][-1]}", answers=row["answers"])
        assert result["qa_f1_reward"] == result["qa_f1_reward/em"] == 1, row
        kinds[row["dataset"]] += 1
    assert sum(kinds.values()) >= 300


# -- Length and repetition ---------------------------------------------------------------------------------------------


def length_of(reply: str, tokens: int, **options: Any) -> dict[str, float | None]:
    task = task_of()
    return scored("length", task, episode_of(task, reply, tokens), **options)


@pytest.mark.parametrize(
    ("tokens", "options", "expected"),
    [
        (100, {"max_tokens": 200}, 1),
        (200, {"max_tokens": 200}, 1),
        (250, {"max_tokens": 200}, 0.75),
        (400, {"max_tokens": 200}, 0),
        (900, {"max_tokens": 200}, 0),
        (250, {"max_tokens": 200, "zero_at": 1.5}, 0.5),
        (200, {"target_tokens": 200}, 1),
        (150, {"target_tokens": 200}, 0.75),
        (250, {"target_tokens": 200}, 0.75),
        (0, {"target_tokens": 200}, 0),
        (256, {}, 1),
        (384, {}, 0.5),
    ],
)
def test_length_in_tokens(tokens: int, options: dict[str, Any], expected: float) -> None:
    result = length_of("x" * 5000, tokens, **options)
    assert result == {"length": pytest.approx(expected), "length/size": tokens}


def test_length_in_characters() -> None:
    assert length_of("x" * 15, 500, max_characters=10) == {"length": 0.5, "length/size": 15}
    assert length_of("x" * 8, 500, target_characters=10)["length"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 5, "max_characters": 5}, "one limit, not max_tokens and max_characters"),
        ({"max_tokens": 0}, "max_tokens must be positive"),
        ({"max_tokens": 5, "zero_at": 1}, "zero_at over 1"),
    ],
)
def test_invalid_limits(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        length_of("x", 1, **options)


@pytest.mark.parametrize(
    ("reply", "options", "repeated"),
    [
        ("one two three four five", {}, 0),
        ("la la la la la la", {}, 2 / 3),  # three 4-grams, one of them new
        ("a b a b a b", {"n": 2}, 3 / 5),  # ab ba ab ba ab
        ("A b a B", {"n": 2}, 1 / 3),  # case does not count
        ("too short", {}, 0),
        ("", {}, 0),
        ("x x", {"n": 1}, 1 / 2),
    ],
)
def test_repetition(reply: str, options: dict[str, Any], repeated: float) -> None:
    task = task_of()
    result = scored("repetition", task, episode_of(task, reply), **options)
    assert result == {"repetition": pytest.approx(1 - repeated), "repetition/repeated": pytest.approx(repeated)}


def test_repetition_of_tokens_sees_the_sampled_ids() -> None:
    task = task_of()
    assert scored("repetition", task, episode_of(task, "x x x x x x", tokens=9), unit="tokens")["repetition"] == 1
    with pytest.raises(RewardError, match="unit is words or tokens"):
        scored("repetition", task, episode_of(task, "x"), unit="letters")
