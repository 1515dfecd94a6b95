"""The built-in rewards: the visible list, and the ones that compare text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from covey.rewards.bfcl import bfcl
from covey.rewards.code import code_reward
from covey.rewards.countdown import countdown
from covey.rewards.function import inline, reward
from covey.rewards.ifeval import ifeval, ifeval_composite
from covey.rewards.judge import Judge
from covey.rewards.maths import math_equal, math_verify
from covey.rewards.numbers import math_reward_string_equal, number, sorted_numbers
from covey.rewards.qa import qa_em_reward, qa_f1_reward
from covey.rewards.reasoning_gym import reasoning_gym
from covey.rewards.reward_model import RewardModel
from covey.rewards.rlla import rlla
from covey.rewards.shape import length, repetition
from covey.rewards.tool_call import tool_call
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
    """What the program or the environment that played the episode says it is worth: its `reward`, or else the sum of
    what it named; each name is measured as given/NAME. Not scored where it said nothing."""
    table = episode.given
    if table is None:
        return None
    values = [value for value in table.values() if value is not None]
    return {"reward": sum(values) if values else None, **table}


REWARDS: dict[str, Callable[..., Any]] = {
    "exact": exact,
    "number": number,
    "math_reward_string_equal": math_reward_string_equal,
    "sorted": sorted_numbers,
    "countdown": countdown,
    "format": answer_format,
    "math_equal": math_equal,
    "math_verify": math_verify,
    "qa_f1_reward": qa_f1_reward,
    "qa_em_reward": qa_em_reward,
    "code_reward": code_reward,
    "ifeval": ifeval,
    "ifeval_composite": ifeval_composite,
    "length": length,
    "repetition": repetition,
    "tool_call": tool_call,
    "bfcl": bfcl,
    "rlla": rlla,
    "given": given,
    "judge": Judge,
    "reward_model": RewardModel,
}
for function in REWARDS.values():  # quick, or bounded by themselves: they need no process that can be killed
    inline(function)
REWARDS["reasoning_gym"] = reasoning_gym  # the package's scorers are neither
