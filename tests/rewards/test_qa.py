"""Answers to questions, against the official formulas written out a second time."""

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
from tests.rewards.replies import score

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


def extras(found: dict[str, Any], name: str = "qa_f1_reward") -> tuple[float, ...]:
    return tuple(found[f"{name}/{key}"] for key in NAMES)


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
    found = score("qa_f1_reward", str(reply), answer)
    assert found["qa_f1_reward"] == found["qa_f1_reward/f1"] == pytest.approx(f1)
    assert found["qa_f1_reward/em"] == em
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
        found = score("qa_f1_reward", f"Answer: {row['answers'][-1]}", answers=row["answers"])
        assert found["qa_f1_reward"] == found["qa_f1_reward/em"] == 1, row
        kinds[row["dataset"]] += 1
    assert sum(kinds.values()) >= 300
