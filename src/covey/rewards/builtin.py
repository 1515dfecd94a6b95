"""The built-in rewards: the visible list, and the ones that compare text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from covey.rewards.bfcl import bfcl
from covey.rewards.code import code_reward
from covey.rewards.countdown import countdown, reasoning_gym
from covey.rewards.function import inline, reward
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
    sorted_numbers,
    whole_number,
)
from covey.rewards.reward_model import RewardModel
from covey.rewards.text import length, normal, qa_em_reward, qa_f1_reward, repetition, short_answer
from covey.rewards.tool_call import rlla, tool_call
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


# -- When two replies give the same final answer, as a reward understands it: for majority votes over several replies --
# A reward whose replies cannot be told apart by a short answer (programs, instructions to follow, an expression of many
# that are right) has no vote.

LONGEST = 200  # characters of two formulas that are compared as such: a vote has no trusted side that is small


@dataclass(frozen=True, slots=True)
class Votes:
    final: Callable[[str], str]  # a reply's final answer; "": it gives none
    same: Callable[[str, str], bool]  # whether two final answers are one


def votes_of(reward: str) -> Votes | None:
    """How replies to tasks of this reward vote. Rewards that are not Covey's own compare the text of replies."""
    return VOTES.get(reward) if reward in REWARDS else TEXT


def _same_text(one: str, other: str) -> bool:
    return one == other


def _same_expression(one: str, other: str) -> bool:
    return one == other or (max(len(one), len(other)) <= LONGEST and equal(one, other) is True)


def _strict_number(reply: str) -> str:
    """A reply that is a number and nothing else in one spelling (1,200. is 1200); others as they are."""
    return _spelled(whole_number(reply)) or reply.strip()


def _last_number(reply: str) -> str:
    return _spelled(last_number(reply))


def _spelled(found: Number | None) -> str:
    return "" if found is None else f"{found.size}{'%' * found.percent}"


TEXT = Votes(str.strip, _same_text)
MATH = Votes(final_expression, _same_expression)
QA = Votes(lambda reply: normal(short_answer(reply)), _same_text)
VOTES = {
    "exact": TEXT,
    "sorted": TEXT,
    "number": Votes(_strict_number, _same_text),
    "math_reward_string_equal": Votes(_last_number, _same_text),
    "math_equal": MATH,
    "math_verify": MATH,
    "qa_f1_reward": QA,
    "qa_em_reward": QA,
}
