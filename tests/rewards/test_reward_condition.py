"""Rewards that count only if another one is earned."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import covey
from covey.errors import InputError
from covey.rewards import resolve_rewards
from covey.types import Episode, Task

TASK = Task("t", ({"role": "user", "content": "2+2?"},), "4")


def right(final_answer: str, answer: str) -> float | None:
    return None if final_answer == "?" else float(final_answer == answer)


def short(final_answer: str) -> float:
    return 1 - len(final_answer) / 10


def close(final_answer: str) -> float:
    return len(final_answer) / 4


def score(reply: str, rewards: list[Any], **only_if: str) -> dict[str, float | None]:
    episode = Episode(TASK, (), (*TASK.messages, {"role": "assistant", "content": reply}))
    return asyncio.run(resolve_rewards(rewards, None, {}, only_if)(TASK, episode))


def test_brevity_counts_only_in_a_right_answer() -> None:
    assert score("4", [right, short], short="right") == {"right": 1.0, "short": 0.9, "short/only_if": 1.0}
    assert score("5", [right, short], short="right") == {"right": 0.0, "short": 0.0, "short/only_if": 0.0}
    assert score("5", [right, short]) == {"right": 0.0, "short": 0.9}


def test_in_python_it_is_a_wrapper_and_leaves_the_function_alone() -> None:
    for wrapped in (covey.only_if(short, right), covey.only_if(short, "right")):
        assert score("4", [right, wrapped]) == {"right": 1.0, "short": 0.9, "short/only_if": 1.0}
        assert score("5", [right, wrapped]) == {"right": 0.0, "short": 0.0, "short/only_if": 0.0}
    assert score("5", [right, short])["short"] == 0.9


def test_a_bar_to_reach() -> None:
    assert score("abc", [close, short], short="close>=0.7")["short"] == pytest.approx(0.7)
    assert score("ab", [close, short], short="close >= 0.7")["short"] == 0.0
    assert score("ab", [close, covey.only_if(short, close, at_least=0.5)])["short"] == pytest.approx(0.8)


def test_an_unscored_condition_leaves_the_reward_unscored() -> None:
    assert score("?", [right, short], short="right") == {"right": None, "short": None, "short/only_if": None}


def test_conditions_look_at_scores_as_given_so_their_order_does_not_matter() -> None:
    chain = {"short": "close", "close": "right"}
    scores = score("55", [right, close, short], **chain)
    assert {name: scores[name] for name in ("right", "close", "short")} == {"right": 0.0, "close": 0.0, "short": 0.8}


def test_it_works_for_async_and_named_rewards() -> None:
    @covey.reward(name="brief")
    async def of_its_own(final_answer: str) -> float:
        return short(final_answer)

    assert score("5", [right, covey.only_if(of_its_own, right)]) == {"right": 0.0, "brief": 0.0, "brief/only_if": 0.0}


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ({"short": "rihgt"}, "unknown reward in reward.only_if  rihgt\n  did you mean   right"),
        ({"shrt": "right"}, "unknown reward in reward.only_if  shrt"),
        ({"short": "short"}, "short cannot depend on itself"),
        ({"short": "right < 2"}, "write NAME, or NAME>=NUMBER"),
    ],
)
def test_mistakes(condition: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_rewards([right, short], None, {}, condition)
