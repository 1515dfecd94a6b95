"""The built-in rewards: the visible list, and the ones that compare text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from covey.rewards.countdown import countdown
from covey.rewards.function import inline, reward
from covey.rewards.judge import Judge
from covey.rewards.numbers import math_reward_string_equal, number, sorted_numbers
from covey.rewards.reward_model import RewardModel


@inline
@reward
def exact(answer: Any, final_answer: str) -> float:
    """1 if the final answer is the answer, but for white space around it."""
    return float(final_answer.strip() == str(answer).strip())


@inline
@reward(name="format")
def answer_format(completion: str) -> float:
    """1 if the answer stands in <answer>…</answer> or \\boxed{…}."""
    return float(_encloses(completion, "<answer>", "</answer>") or _encloses(completion, r"\boxed{", "}"))


def _encloses(text: str, opening: str, closing: str) -> bool:
    _, found, rest = text.rpartition(opening)
    inside, closed, _ = rest.partition(closing)
    return bool(found and closed and inside.strip())


REWARDS: dict[str, Callable[..., Any]] = {
    "exact": exact,
    "number": number,
    "math_reward_string_equal": math_reward_string_equal,
    "sorted": sorted_numbers,
    "countdown": countdown,
    "format": answer_format,
    "judge": Judge,
    "reward_model": RewardModel,
}
