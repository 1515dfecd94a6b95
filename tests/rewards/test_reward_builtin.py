"""The built-in rewards and their votes, on replies scored by hand."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from covey.evaluation.statistics import majority
from covey.rewards import REWARDS, RewardError, resolve_rewards, votes_of
from covey.types import Episode, Task

# -- Rewards -----------------------------------------------------------------------------------------------------------


def score(name: str, reply: str, answer: Any = None, **columns: Any) -> dict[str, float | None]:
    messages = ({"role": "user", "content": "?"},)
    task = Task("t", messages, answer, columns)
    episode = Episode(task, (), (*messages, {"role": "assistant", "content": reply}))
    return asyncio.run(resolve_rewards(name, None, {})(task, episode))


def test_every_reward_is_listed_under_its_own_name() -> None:
    needed = {"judge": {"url": "http://x/v1", "model": "m"}, "reward_model": {"model": "m"}}
    for name in REWARDS:
        options = {name: needed[name]} if name in needed else {}
        assert resolve_rewards(name, None, {}, options=options).names == (name,)


@pytest.mark.parametrize(
    ("reply", "answer", "expected"),
    [
        ("Paris", "Paris", 1.0),
        (" Paris\n", "Paris", 1.0),
        ("paris", "Paris", 0.0),
        ("Paris.", "Paris", 0.0),
        ("5", 5, 1.0),
    ],
)
def test_exact(reply: str, answer: Any, expected: float) -> None:
    assert score("exact", reply, answer) == {"exact": expected}


@pytest.mark.parametrize(
    ("reply", "answer", "strict", "lenient"),
    [
        ("85", "85", 1, 1),
        (" 85.\n", "85", 1, 1),
        ("85.0", "85", 1, 1),
        ("85..", "85", 0, 1),
        ("85!", "85", 0, 1),
        ("47 + 38 = 85", "85", 0, 1),
        ("85 is 47 + 38", "85", 0, 0),
        ("-85", "85", 0, 0),
        ("-85", -85, 1, 1),
        ("850", "85", 0, 0),
        ("1,000", "1000", 1, 1),
        ("eighty-five", "85", 0, 0),
        ("", "85", 0, 0),
        # percentages: as math_equal reads them
        ("50%", "50%", 1, 1),
        ("50 %.", "50%", 1, 1),
        ("50\\%", "50%", 1, 1),
        ("50", "50%", 1, 1),
        ("0.5", "50%", 1, 1),
        ("1/2", "50%", 1, 1),
        ("50%", "50", 1, 1),
        ("50%", 0.5, 1, 1),
        ("50%", "49%", 0, 0),
        ("0.5%", "50%", 0, 0),
        ("0.4", "50%", 0, 0),
        ("49%", "50", 0, 0),
        ("5000%", "50", 1, 1),
        ("0.5", "50", 0, 0),
        # fractions
        ("3/4", "3/4", 1, 1),
        ("0.75", "3/4", 1, 1),
        ("6 / 8", "3/4", 1, 1),
        ("-3/4", "-3/4", 1, 1),
        ("3/4", "0.75", 1, 1),
        ("4", "3/4", 0, 0),
        ("4/3", "3/4", 0, 0),
        ("3/4", "4", 0, 0),
        ("so it is 3/4", "3/4", 0, 1),
        ("1/0", "1", 0, 0),
        ("1/2/2024", "0.5", 0, 0),
        # powers of ten
        ("1e3", "1e3", 1, 1),
        ("1000", "1e3", 1, 1),
        ("1,000", 1e3, 1, 1),
        ("1E-3", "0.001", 1, 1),
        ("1e4", "1e3", 0, 0),
        ("1e3000", "1e3", 0, 0),
        ("9" * 5000, "9", 0, 0),
        ("1/" + "9" * 5000, "1", 0, 0),
    ],
)
def test_number(reply: str, answer: Any, strict: float, lenient: float) -> None:
    assert score("number", reply, answer) == {"number": strict, "number/lenient": lenient}


@pytest.mark.parametrize(
    ("reply", "answer", "expected"),
    [
        ("So she sold 48 + 24 = 72 clips.", "48/2 = <<48/2=24>>24\n#### 72", 1),
        ("72", "72", 1),
        ("The answer is \\boxed{72}.", 72, 1),
        ("It is **$1,234.50**.", "1234.5", 1),
        ("1,234", "1234", 1),
        ("1234", "#### 1,234", 1),
        ("It fell by -5", "-5", 1),
        ("It fell by -$5", "-5", 1),
        ("It fell by −5", "-5", 1),
        ("from 10-5", "5", 1),
        ("from 10-5", "-5", 0),
        ("-5", "5", 0),
        ("0.5", "5", 0),
        (".5", "0.5", 1),
        ("the pair 1,2", "2", 1),
        ("72 or 73", "72", 0),
        ("72%", "72%", 1),
        ("1,2345", "12345", 0),
        ("1,2345", "2345", 1),
        ("no number", "0", 0),
        ("It is 3/4", "3/4", 1),
        ("It is 3/4", "4", 0),
        ("about 50%", "50%", 1),
        ("48/2 = 24", "24", 1),
        ("٧٢", "72", 0),
    ],
)
def test_math_reward_string_equal(reply: str, answer: Any, expected: float) -> None:
    assert score("math_reward_string_equal", reply, answer) == {"math_reward_string_equal": expected}


@pytest.mark.parametrize("answer", ["1/0", "1e1000", "50%%", "1/2/3", "nan", "three sevenths"])
def test_what_is_not_a_number(answer: str) -> None:
    with pytest.raises(RewardError, match="is not a number"):
        score("number", "1", answer)


@pytest.mark.parametrize("name", ["number", "math_reward_string_equal"])
def test_a_non_numeric_answer_is_an_error(name: str) -> None:
    with pytest.raises(RewardError) as caught:
        score(name, "7", "\\frac{3}{7}")
    assert str(caught.value) == f"reward {name} on task t: ValueError: the answer '\\\\frac{{3}}{{7}}' is not a number"


@pytest.mark.parametrize(
    ("reply", "strict", "lenient"),
    [
        ("23 45 61", 1, 1),
        ("\n23 45 61 ", 1, 1),
        ("23, 45, 61", 0, 1),
        ("23,45,61", 0, 1),
        ("23, 45, 61.", 0, 1),
        ("The numbers 61, 23, 45 sorted:\n- 23\n- 45\n- 61", 0, 1),
        ("23 < 45 < 61", 0, 1),
        ("61, 45, 23", 0, 0),
        ("45, 61", 0, 0),
        ("23, 45, 61, 61", 0, 0),
        ("23, 45, 61 (3 numbers)", 0, 0),
        ("23 45 610", 0, 0),
        ("", 0, 0),
    ],
)
def test_sorted(reply: str, strict: float, lenient: float) -> None:
    assert score("sorted", reply, numbers=[61, 23, 45]) == {"sorted": strict, "sorted/lenient": lenient}


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("3 * 7 + 25", 1),
        ("25+(7*3)", 1),
        ("3 * 7 + 25 = 46", 1),
        ("3 * 7 + 25 = 21 + 25 = 46", 1),
        ("46 = 3 * 7 + 25.", 1),
        ("Answer: **3 × 7 + 25**", 1),
        ("- 3 * 7 + 25", 1),
        ("\\boxed{3*7+25}", 1),
        ("<answer>3*7+25</answer>", 1),
        ("3 + 7 is too little.\n\nTry 7 * 3 + 25\nThat is it.", 1),
        ("Not 3 + 7 but 3 * 7 + 25", 1),
        ("3 * 7 + 25\n3 + 7", 0),  # the last one counts
        ("3 + 7 = 10, 10 * 25", 0),
        ("46", 0),
        ("45 + 1", 0),  # numbers that were not given
        ("7 * 3 + 25 + 3 - 3", 0),  # 3 three times
        ("3 * 7 + 25 + 0", 0),
        ("-3 * -7 + 25", 0),  # there is no sign among the operations
        ("3 * 7 + 25 = 47 - 1", 1),
        ("(3 * 7 + 25", 0),
        ("3(7) + 25", 0),
        ("25 + 7 * 3.0", 0),
        ("25 / (7 - 7)", 0),
        ("nothing", 0),
        ("", 0),
    ],
)
def test_countdown(reply: str, expected: float) -> None:
    assert score("countdown", reply, numbers=[3, 7, 25], target=46) == {"countdown": expected}


@pytest.mark.parametrize(
    ("reply", "numbers", "target", "expected"),
    [
        ("8 / (3 - 8 / 3)", [3, 3, 8, 8], 24, 1),  # fractions on the way, exactly
        ("2 ** 5", [2, 5], 32, 0),
        ("7 // 2", [7, 2], 3, 0),
        ("5 + 5", [5, 4], 10, 0),
        ("5 + 5", [5, 5], 10, 1),
        ("3 + 4", [3, 4, 9], 7, 1),  # not all numbers need be used
        ("9 - 1 - 1", [9, 1, 1], 7, 1),  # from left to right
        ("(" * 5000 + "3 + 4" + ")" * 5000, [3, 4], 7, 0),
        ("9" * 5000 + " + 4", [3, 4], 7, 0),
        ("3 +" + " " * 300 + "4", [3, 4], 7, 0),  # longer than any honest answer
    ],
)
def test_countdown_arithmetic(reply: str, numbers: list[int], target: int, expected: float) -> None:
    assert score("countdown", reply, numbers=numbers, target=target) == {"countdown": expected}


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Thus <answer>5</answer>", 1),
        ("Thus \\boxed{5}", 1),
        ("<answer> </answer>", 0),
        ("\\boxed{}", 0),
        ("<answer>5", 0),
        ("</answer>5<answer>", 0),
        ("5", 0),
    ],
)
def test_format(reply: str, expected: float) -> None:
    assert score("format", reply) == {"format": expected}


# -- given -------------------------------------------------------------------------------------------------------------


TASK = Task("t", ({"role": "user", "content": "q"},))


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (None, {"given": None}),
        ({"reward": 0.25}, {"given": 0.25}),
        ({"reward": 1.0, "style": 0.5}, {"given": 1.0, "given/style": 0.5}),
        ({"reward": None}, {"given": None}),
    ],
)
def test_given(table: Mapping[str, float | None] | None, expected: dict[str, float | None]) -> None:
    rewards = resolve_rewards("given", None, {})
    assert asyncio.run(rewards(TASK, Episode(TASK, (), TASK.messages, given=table))) == expected


# -- Votes -------------------------------------------------------------------------------------------------------------


def camps(reward: str, *replies: str) -> int | None:
    votes = votes_of(reward)
    assert votes is not None
    return majority([votes.final(reply) for reply in replies], votes.same)


@pytest.mark.parametrize("reward", ["math_equal", "math_verify"])
def test_formulas_vote_by_value(reward: str) -> None:
    replies = (r"so \boxed{3}", r"It is \boxed{\frac{1}{2}}", "the answer is 0.5", r"\boxed{3}", r"\boxed{1/2}")
    assert camps(reward, *replies) == 1


def test_an_unclosed_box_does_not_vote() -> None:
    assert camps("math_equal", r"\boxed{3", r"\boxed{3", r"\boxed{4}") == 2


def test_long_formulas_are_compared_as_text() -> None:
    nested = "(1," * 300 + "2" + ")" * 300
    assert camps("math_equal", r"\boxed{5}", rf"\boxed{{{nested}}}", rf"\boxed{{{nested}}}") == 1


def test_numbers_vote_by_value() -> None:
    assert camps("number", "7", "12", "12.", "12.0") == 1
    assert camps("number", "7", "7.0", "it is 12", "12", "12") == 0  # strict: words around it make another answer
    assert camps("math_reward_string_equal", "7", "it is 1,200", "1200 or so") == 1
    assert camps("math_reward_string_equal", "none", "nothing") is None
    assert camps("number", "50%", "3/4", "0.75") == 1
    assert camps("number", "4", "9" * 5000, "9" * 5000) == 1


def test_short_answers_vote_without_case_and_articles() -> None:
    assert camps("qa_f1_reward", "Rome", "<answer>The Hague</answer>", "Answer: the hague.") == 1


def test_rewards_with_votes() -> None:
    assert votes_of("code_reward") is None and votes_of("countdown") is None
    mine = votes_of("mine")
    assert mine is not None and mine.final(" a ") == "a" and "mine" not in REWARDS


def test_only_the_scorers_of_reasoning_gym_run_in_workers() -> None:
    """Also if a function is imported and passed in Python, so that nothing looks it up by its name."""
    targets = REWARDS._targets
    script = f"""
import importlib
for name, target in {targets!r}.items():
    module, _, attribute = target.partition(":")
    if not getattr(getattr(importlib.import_module(module), attribute), "reward_inline", False):
        print(name)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["reasoning_gym"]
