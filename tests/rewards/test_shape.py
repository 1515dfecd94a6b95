"""Length and repetition, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from covey.rewards import RewardError
from tests.rewards.replies import episode_of, scored, task_of


def length_of(reply: str, tokens: int, **options: Any) -> dict[str, float | None]:
    task = task_of()
    return scored("length", task, episode_of(task, reply, tokens), **options)


@pytest.mark.parametrize(
    ("tokens", "options", "expected"),
    [
        (100, {"max_tokens": 200}, 1),
        (200, {"max_tokens": 200}, 1),
        (250, {"max_tokens": 200}, 0.75),
        (400, {"max_tokens": 200}, 0),
        (900, {"max_tokens": 200}, 0),
        (250, {"max_tokens": 200, "zero_at": 1.5}, 0.5),
        (200, {"target_tokens": 200}, 1),
        (150, {"target_tokens": 200}, 0.75),
        (250, {"target_tokens": 200}, 0.75),
        (0, {"target_tokens": 200}, 0),
        (256, {}, 1),
        (384, {}, 0.5),
    ],
)
def test_length_in_tokens(tokens: int, options: dict[str, Any], expected: float) -> None:
    found = length_of("x" * 5000, tokens, **options)
    assert found == {"length": pytest.approx(expected), "length/size": tokens}


def test_length_in_characters() -> None:
    assert length_of("x" * 15, 500, max_characters=10) == {"length": 0.5, "length/size": 15}
    assert length_of("x" * 8, 500, target_characters=10)["length"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 5, "max_characters": 5}, "one limit, not max_tokens and max_characters"),
        ({"max_tokens": 0}, "max_tokens must be positive"),
        ({"max_tokens": 5, "zero_at": 1}, "zero_at over 1"),
    ],
)
def test_limits_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        length_of("x", 1, **options)


@pytest.mark.parametrize(
    ("reply", "options", "repeated"),
    [
        ("one two three four five", {}, 0),
        ("la la la la la la", {}, 2 / 3),  # three 4-grams, one of them new
        ("a b a b a b", {"n": 2}, 3 / 5),  # ab ba ab ba ab
        ("A b a B", {"n": 2}, 1 / 3),  # case does not count
        ("too short", {}, 0),
        ("", {}, 0),
        ("x x", {"n": 1}, 1 / 2),
    ],
)
def test_repetition(reply: str, options: dict[str, Any], repeated: float) -> None:
    task = task_of()
    found = scored("repetition", task, episode_of(task, reply), **options)
    assert found == {"repetition": pytest.approx(1 - repeated), "repetition/repeated": pytest.approx(repeated)}


def test_repetition_of_tokens_sees_the_sampled_ids() -> None:
    task = task_of()
    assert scored("repetition", task, episode_of(task, "x x x x x x", tokens=9), unit="tokens")["repetition"] == 1
    with pytest.raises(RewardError, match="unit is words or tokens"):
        scored("repetition", task, episode_of(task, "x"), unit="letters")
