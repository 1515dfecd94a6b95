"""Which replies are one answer."""

from __future__ import annotations

import pytest

from covey.evaluation.statistics import majority
from covey.rewards import REWARDS, votes_of


def camps(reward: str, *replies: str) -> int | None:
    votes = votes_of(reward)
    assert votes is not None
    return majority([votes.final(reply) for reply in replies], votes.same)


@pytest.mark.parametrize("reward", ["math_equal", "math_verify"])
def test_formulas_vote_by_what_they_are_worth(reward: str) -> None:
    replies = (r"so \boxed{3}", r"It is \boxed{\frac{1}{2}}", "the answer is 0.5", r"\boxed{3}", r"\boxed{1/2}")
    assert camps(reward, *replies) == 1


def test_a_box_that_was_cut_off_is_no_vote() -> None:
    assert camps("math_equal", r"\boxed{3", r"\boxed{3", r"\boxed{4}") == 2


def test_long_formulas_are_compared_as_text() -> None:
    nested = "(1," * 300 + "2" + ")" * 300
    assert camps("math_equal", r"\boxed{5}", rf"\boxed{{{nested}}}", rf"\boxed{{{nested}}}") == 1


def test_numbers_vote_by_value_where_the_reward_reads_them() -> None:
    assert camps("number", "7", "12", "12.", "12.0") == 1
    assert camps("number", "7", "7.0", "it is 12", "12", "12") == 0  # strict: words around it make another answer
    assert camps("math_reward_string_equal", "7", "it is 1,200", "1200 or so") == 1
    assert camps("math_reward_string_equal", "none", "nothing") is None
    assert camps("number", "50%", "3/4", "0.75") == 1
    assert camps("number", "4", "9" * 5000, "9" * 5000) == 1


def test_short_answers_vote_without_case_and_articles() -> None:
    assert camps("qa_f1_reward", "Rome", "<answer>The Hague</answer>", "Answer: the hague.") == 1


def test_who_votes() -> None:
    assert votes_of("code_reward") is None and votes_of("countdown") is None
    mine = votes_of("mine")
    assert mine is not None and mine.final(" a ") == "a" and "mine" not in REWARDS
