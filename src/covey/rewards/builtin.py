"""The built-in rewards: the visible list, and the ones that compare text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from covey.rewards.countdown import countdown
from covey.rewards.function import reward
from covey.rewards.numbers import math_reward_string_equal, number, sorted_numbers
from covey.types import Episode


@reward
def exact(answer: Any, final_answer: str) -> float:
    """1 if the final answer is the answer, but for white space around it."""
    return float(final_answer.strip() == str(answer).strip())


@reward(name="format")
def answer_format(completion: str) -> float:
    """1 if the answer stands in <answer>…</answer> or \\boxed{…}."""
    return float(_encloses(completion, "<answer>", "</answer>") or _encloses(completion, r"\boxed{", "}"))


def _encloses(text: str, opening: str, closing: str) -> bool:
    _, found, rest = text.rpartition(opening)
    inside, closed, _ = rest.partition(closing)
    return bool(found and closed and inside.strip())


@reward
def given(episode: Episode) -> dict[str, float | None] | None:
    """What an environment, or the program that played the episode, says it is worth; None if it says nothing."""
    table = episode.given
    key = next((key for key in ("reward", "given") if table and key in table), None)
    if table is None or key is None:
        return None
    return {"reward": table[key], **{name: value for name, value in table.items() if name not in ("reward", "given")}}


REWARDS: dict[str, Callable[..., Any]] = {
    "exact": exact,
    "number": number,
    "math_reward_string_equal": math_reward_string_equal,
    "sorted": sorted_numbers,
    "countdown": countdown,
    "format": answer_format,
    "given": given,
}
