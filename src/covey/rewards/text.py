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
from covey.types import Episode, Task

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


# -- Rewards for the shape of a reply, whatever it says: how long it is, and how much it repeats itself ----------------
# They are worth little alone: `reward='[exact,length]' reward.only_if='{length: exact}'` pays brevity only where the
# answer is right.

MAX_TOKENS = 256  # where no limit is given


@reward
def length(
    completion: str,
    episode: Episode,
    max_tokens: int | None = None,
    max_characters: int | None = None,
    target_tokens: int | None = None,
    target_characters: int | None = None,
    zero_at: float = 2.0,
) -> dict[str, float]:
    """Up to a maximum 1, then falling linearly to 0 at `zero_at` times the maximum; or 1 at a target, falling linearly
    to 0 at `zero_at` times the target and, as fast, below it. Tokens are all that were sampled in the episode.

    Extra `size`: what was measured, in tokens or characters.
    """
    limits = {
        "max_tokens": max_tokens,
        "max_characters": max_characters,
        "target_tokens": target_tokens,
        "target_characters": target_characters,
    }
    given = {name: limit for name, limit in limits.items() if limit is not None} or {"max_tokens": MAX_TOKENS}
    if len(given) > 1:
        raise ValueError(f"length takes one limit, not {' and '.join(given)}")
    ((name, limit),) = given.items()
    if limit <= 0 or zero_at <= 1:
        raise ValueError(f"length: {name} must be positive and zero_at over 1, got {limit} and {zero_at:g}")
    size = episode.response_tokens if name.endswith("tokens") else len(completion)
    distance = size - limit if name.startswith("max") else abs(size - limit)
    return {"reward": min(1.0, max(0.0, 1 - distance / (limit * (zero_at - 1)))), "size": float(size)}


@reward
def repetition(completion: str, episode: Episode, n: int = 4, unit: str = "words") -> dict[str, float]:
    """1 − the share of n-grams that occurred before: 1 where nothing is repeated (also in a text shorter than n), near
    0 in a loop. `unit` is words or tokens; tokens also count where words are not parted by spaces.

    Extra `repeated`: the share.
    """
    if unit not in ("words", "tokens"):
        raise ValueError(f"repetition: unit is words or tokens, not {unit!r}")
    if n < 1:
        raise ValueError(f"repetition: n must be at least 1, got {n}")
    texts: list[Sequence[Any]] = (
        [completion.lower().split()] if unit == "words" else [turn.completion_ids for turn in episode.turns]
    )
    grams = [tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)]
    repeated = 1 - len(set(grams)) / len(grams) if grams else 0.0
    return {"reward": 1 - repeated, "repeated": repeated}
