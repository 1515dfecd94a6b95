"""When two replies give the same final answer, as a reward understands it: for majority votes over several replies.

A reward whose replies cannot be told apart by a short answer (programs, instructions to follow, an expression of many
that are right) has no vote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from covey.rewards.builtin import REWARDS
from covey.rewards.maths import equal, final_expression
from covey.rewards.numbers import Number, last_number, whole_number
from covey.rewards.qa import normal, short_answer

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
