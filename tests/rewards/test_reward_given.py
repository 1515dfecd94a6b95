"""given: what a program or an environment says an episode is worth."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from covey.rewards import resolve_rewards
from covey.types import Episode, Task

TASK = Task("t", ({"role": "user", "content": "q"},))


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (None, {"given": None}),
        ({"reward": 0.25}, {"given": 0.25}),
        ({"reward": 1.0, "style": 0.5}, {"given": 1.0, "given/style": 0.5}),
        ({"a": 1.0, "b": -0.25}, {"given": 0.75, "given/a": 1.0, "given/b": -0.25}),
        ({"a": None, "b": 2.0}, {"given": 2.0, "given/a": None, "given/b": 2.0}),
        ({"reward": None}, {"given": None}),
    ],
)
def test_given(table: Mapping[str, float | None] | None, expected: dict[str, float | None]) -> None:
    rewards = resolve_rewards("given", None, {})
    assert asyncio.run(rewards(TASK, Episode(TASK, (), TASK.messages, given=table))) == expected
