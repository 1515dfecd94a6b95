"""The built-in rewards by name, and how replies vote under each of them (maj@n).

A vote needs a short final answer that can be compared. Rewards without one (programs, instructions to follow,
expressions of which many are correct) have no entry in VOTES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from covey.rewards.bfcl import bfcl
from covey.rewards.code import code_reward
from covey.rewards.function import inline, reward
from covey.rewards.generated import countdown, reasoning_gym, sorted_numbers
from covey.rewards.ifeval import ifeval, ifeval_composite
from covey.rewards.judge import Judge
from covey.rewards.math.rewards import (
    Number,
    equal,
    final_expression,
    last_number,
    math_equal,
    math_reward_string_equal,
    math_verify,
    number,
    whole_number,
)
from covey.rewards.reward_model import RewardModel
from covey.rewards.text import (
    answer_format,
    exact,
    length,
    normalize_answer,
    qa_em_reward,
    qa_f1_reward,
    repetition,
    short_answer,
)
from covey.rewards.tool_call import rlla, tool_call
from covey.types import Episode


@reward
def given(episode: Episode) -> dict[str, float | None] | None:
    """The reward that the environment or program reported for the episode: its `reward`, or else the sum of its named
    values, which are measured as given/NAME. None if it reported nothing."""
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
for function in REWARDS.values():  # fast, or bounded by themselves
    inline(function)
REWARDS["reasoning_gym"] = reasoning_gym  # runs in a worker: that package's scorers are neither


# -- Votes -------------------------------------------------------------------------------------------------------------

MAX_COMPARED = 200  # characters; both expressions of a comparison are the model's, so both may be hostile


@dataclass(frozen=True, slots=True)
class Votes:
    final: Callable[[str], str]  # the final answer of a reply; "" if there is none
    same: Callable[[str, str], bool]  # whether two final answers agree


def votes_of(reward: str) -> Votes | None:
    """How replies to tasks with this reward vote. For a user's own reward, replies vote by their text."""
    return VOTES.get(reward) if reward in REWARDS else TEXT


def _same_text(one: str, other: str) -> bool:
    return one == other


def _same_expression(one: str, other: str) -> bool:
    return one == other or (max(len(one), len(other)) <= MAX_COMPARED and equal(one, other) is True)


def _canonical(value: Number | None) -> str:
    """One spelling of a number: 1,200 and 1200. are both 1200."""
    return "" if value is None else f"{value.size}{'%' * value.percent}"


TEXT = Votes(str.strip, _same_text)
MATH = Votes(final_expression, _same_expression)
QA = Votes(lambda reply: normalize_answer(short_answer(reply)), _same_text)
VOTES = {
    "exact": TEXT,
    "sorted": TEXT,
    "number": Votes(lambda reply: _canonical(whole_number(reply)) or reply.strip(), _same_text),
    "math_reward_string_equal": Votes(lambda reply: _canonical(last_number(reply)), _same_text),
    "math_equal": MATH,
    "math_verify": MATH,
    "qa_f1_reward": QA,
    "qa_em_reward": QA,
}
