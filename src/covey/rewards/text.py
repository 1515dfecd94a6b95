"""Rewards that compare short texts or measure a reply: exact match, format, token F1, length and repetition.

The QA rewards follow Rajpurkar et al. 2016 (SQuAD), https://arxiv.org/abs/1606.05250, and Yang et al. 2018 (HotpotQA),
https://arxiv.org/abs/1809.09600:

    normalize(s) = lower case, no punctuation, no articles, single spaces
    EM = normalize(prediction) == normalize(gold)       F1 = 2PR / (P + R) over the multisets of normalized tokens

Yes, no and noanswer earn no partial credit (HotpotQA). An empty gold answer marks an unanswerable question; only an
empty prediction matches it (SQuAD 2). With several gold answers, the best match counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from covey.errors import InputError
from covey.rewards.answers import labelled, tagged
from covey.rewards.function import inline, reward
from covey.types import Episode, Task

# -- Exact match and format --------------------------------------------------------------------------------------------


@inline
@reward
def exact(answer: Any, final_answer: str) -> float:
    """1 if the final answer equals the answer, ignoring surrounding white space."""
    return float(final_answer.strip() == str(answer).strip())


@inline
@reward(name="format")
def answer_format(completion: str) -> float:
    """1 if the completion has a non-empty <answer>…</answer> or \\boxed{…}."""
    return float(_encloses(completion, "<answer>", "</answer>") or _encloses(completion, r"\boxed{", "}"))


def _encloses(text: str, opening: str, closing: str) -> bool:
    _, opened, rest = text.rpartition(opening)
    inside, closed, _ = rest.partition(closing)
    return bool(opened and closed and inside.strip())


# -- Question answering ------------------------------------------------------------------------------------------------

CLOSED = {"yes", "no", "noanswer"}
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Overlap(NamedTuple):
    em: float
    f1: float
    precision: float
    recall: float


def _check_gold(task: Task) -> None:
    if task.answer is None and not task.columns.get("answers"):
        raise InputError(
            f"{task.where} has no gold answer for qa_f1_reward or qa_em_reward\n"
            "  fix: a column `answer` (a string, or a list of acceptable ones) or `answers` (a list)"
        )
    gold = task.columns.get("answers") if task.answer is None else task.answer
    if isinstance(gold, Mapping) and not _is_list(gold.get("text")):
        raise InputError(
            f"{task.where}: qa_f1_reward and qa_em_reward cannot read its gold answer, a table with the keys "
            f"{', '.join(map(str, gold))}\n"
            "  fix: a string, a list of acceptable ones, or SQuAD's table with a list under `text`"
        )


@inline
@reward(check=_check_gold)
def qa_f1_reward(final_answer: str, answer: Any = None, answers: Any = None) -> dict[str, float]:
    """Token F1 with the best of the gold answers. Extras: em, f1, precision, recall."""
    best = best_overlap(short_answer(final_answer), _gold(answer, answers))
    return {"reward": best.f1, **best._asdict()}


@inline
@reward(check=_check_gold)
def qa_em_reward(final_answer: str, answer: Any = None, answers: Any = None) -> dict[str, float]:
    """1 if the normalized answer equals a normalized gold answer. Extras: em, f1, precision, recall."""
    best = best_overlap(short_answer(final_answer), _gold(answer, answers))
    return {"reward": best.em, **best._asdict()}


def short_answer(reply: str) -> str:
    """The text in <answer>, else the line after `Answer:`, else the whole reply."""
    inside = tagged(reply)
    if inside is None:
        inside = labelled(reply)
    return reply if inside is None else inside


def best_overlap(prediction: str, gold: Sequence[str]) -> Overlap:
    return max((overlap(prediction, one) for one in gold), key=lambda one: (one.f1, one.em))


def overlap(prediction: str, gold: str) -> Overlap:
    prediction, gold = normalize_answer(prediction), normalize_answer(gold)
    if prediction == gold:
        return Overlap(1.0, 1.0, 1.0, 1.0)
    tokens, gold_tokens = prediction.split(), gold.split()
    common = sum((Counter(tokens) & Counter(gold_tokens)).values())
    if prediction in CLOSED or gold in CLOSED or common == 0:
        return Overlap(0.0, 0.0, 0.0, 0.0)
    precision, recall = common / len(tokens), common / len(gold_tokens)
    return Overlap(0.0, 2 * precision * recall / (precision + recall), precision, recall)


def normalize_answer(text: str) -> str:
    """SQuAD's order: punctuation goes before articles, so `a.` is an article."""
    words = re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(NO_PUNCTUATION))
    return " ".join(words.split())


def _gold(answer: Any, answers: Any) -> list[str]:
    gold = answers if answer is None else answer
    if isinstance(gold, Mapping):  # SQuAD's table; an empty list marks an unanswerable question
        gold = list(gold["text"]) or [""]
    texts = [str(one) for one in gold] if _is_list(gold) else [str(gold)]
    if gold is None or not texts:
        raise ValueError("there is no gold answer")
    return texts


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


# -- Length and repetition: combine them with a reward for the content (reward.only_if={length: exact}) ----------------

MAX_TOKENS = 256  # default of `length`


@inline
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
    """With a maximum: 1 up to it, then falling linearly to 0 at `zero_at` times the maximum. With a target: 1 there,
    falling to both sides with the same slope. Tokens are all that were sampled in the episode.

    Extra `size`: the measured length, in tokens or characters.
    """
    options = {
        "max_tokens": max_tokens,
        "max_characters": max_characters,
        "target_tokens": target_tokens,
        "target_characters": target_characters,
    }
    limits = {name: limit for name, limit in options.items() if limit is not None} or {"max_tokens": MAX_TOKENS}
    if len(limits) > 1:
        raise ValueError(f"length takes one limit, not {' and '.join(limits)}")
    ((name, limit),) = limits.items()
    if limit <= 0 or zero_at <= 1:
        raise ValueError(f"length: {name} must be positive and zero_at over 1, got {limit} and {zero_at:g}")
    size = episode.response_tokens if name.endswith("tokens") else len(completion)
    distance = size - limit if name.startswith("max") else abs(size - limit)
    return {"reward": min(1.0, max(0.0, 1 - distance / (limit * (zero_at - 1)))), "size": float(size)}


@inline
@reward
def repetition(completion: str, episode: Episode, n: int = 4, unit: str = "words") -> dict[str, float]:
    """1 − the share of repeated n-grams: 1 if nothing repeats (also if the text is shorter than n), near 0 in a loop.
    `unit` is words or tokens; use tokens for languages that do not separate words by spaces.

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
