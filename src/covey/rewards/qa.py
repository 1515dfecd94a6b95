"""Rewards for answers that are a few words: exact match and token F1.

Rajpurkar et al. 2016 (SQuAD), https://arxiv.org/abs/1606.05250; Yang et al. 2018 (HotpotQA),
https://arxiv.org/abs/1809.09600

    normal(s) = lower case, no punctuation, no articles, single spaces
    EM = normal(prediction) == normal(gold)          F1 = 2PR / (P + R) over the multisets of normal tokens

Yes, no and noanswer are right or wrong: no part of them counts (HotpotQA). An empty gold answer means that the question
has none, and only an empty prediction meets it (SQuAD 2). Of several gold answers the best match counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.errors import InputError
from covey.rewards.answers import labelled, tagged
from covey.rewards.function import reward
from covey.types import Task

CLOSED = {"yes", "no", "noanswer"}
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Overlap:
    em: float
    f1: float
    precision: float
    recall: float


def _check(task: Task) -> None:
    if task.answer is None and not task.columns.get("answers"):
        raise InputError(
            f"{task.where} has no gold answer for qa_f1_reward or qa_em_reward\n"
            "  fix: a column `answer` (a string, or a list of acceptable ones) or `answers` (a list)"
        )
    given = task.columns.get("answers") if task.answer is None else task.answer
    if isinstance(given, Mapping) and not _is_list(given.get("text")):
        raise InputError(
            f"{task.where}: qa_f1_reward and qa_em_reward cannot read its gold answer, a table with the keys "
            f"{', '.join(map(str, given))}\n"
            "  fix: a string, a list of acceptable ones, or SQuAD's table with a list under `text`"
        )


@reward(check=_check)
def qa_f1_reward(final_answer: str, answer: Any = None, answers: Any = None) -> dict[str, float]:
    """Token F1 with the gold answer, the best of several. Extras: em, f1, precision, recall."""
    found = best_overlap(short_answer(final_answer), _gold(answer, answers))
    return {"reward": found.f1, "em": found.em, "f1": found.f1, "precision": found.precision, "recall": found.recall}


@reward(check=_check)
def qa_em_reward(final_answer: str, answer: Any = None, answers: Any = None) -> dict[str, float]:
    """1 if the answer is the gold answer, but for case, punctuation, articles and spaces. The same extras."""
    found = best_overlap(short_answer(final_answer), _gold(answer, answers))
    return {"reward": found.em, "em": found.em, "f1": found.f1, "precision": found.precision, "recall": found.recall}


def short_answer(reply: str) -> str:
    """What stands in <answer>, else after `Answer:`, else all of it."""
    inside = tagged(reply)
    if inside is None:
        inside = labelled(reply)
    return reply if inside is None else inside


def best_overlap(prediction: str, gold: Sequence[str]) -> Overlap:
    return max((overlap(prediction, one) for one in gold), key=lambda found: (found.f1, found.em))


def overlap(prediction: str, gold: str) -> Overlap:
    said, right = normal(prediction), normal(gold)
    if said == right:
        return Overlap(1.0, 1.0, 1.0, 1.0)
    if said in CLOSED or right in CLOSED:
        return Overlap(0.0, 0.0, 0.0, 0.0)
    ours, theirs = said.split(), right.split()
    common = sum((Counter(ours) & Counter(theirs)).values())
    if common == 0:
        return Overlap(0.0, 0.0, 0.0, 0.0)
    precision, recall = common / len(ours), common / len(theirs)
    return Overlap(0.0, 2 * precision * recall / (precision + recall), precision, recall)


def normal(text: str) -> str:
    """SQuAD's order: punctuation goes before articles, so that `a.` is one."""
    words = re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(NO_PUNCTUATION))
    return " ".join(words.split())


def _gold(answer: Any, answers: Any) -> list[str]:
    given = answers if answer is None else answer
    if isinstance(given, Mapping):  # as SQuAD has it; an empty list: the question has no answer
        given = list(given["text"]) or [""]
    found = [str(one) for one in given] if _is_list(given) else [str(given)]
    if given is None or not found:
        raise ValueError("there is no gold answer")
    return found


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
