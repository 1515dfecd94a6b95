"""Scoring one reply with a built-in reward, for the tests of this folder."""

from __future__ import annotations

import asyncio
import functools
import inspect
from typing import Any

from covey.rewards import REWARDS, resolve_rewards
from covey.types import Episode, Task, ToolUse, Turn

QUESTION = ({"role": "user", "content": "?"},)


def task_of(answer: Any = None, **columns: Any) -> Task:
    return Task("t", QUESTION, answer, columns)


def episode_of(task: Task, reply: str, tokens: int = 0, tools: tuple[ToolUse, ...] = (), **message: Any) -> Episode:
    turns = (Turn((1,), tuple(range(tokens)), (0.0,) * tokens, (0,) * tokens, "eos"),) if tokens else ()  # type: ignore[arg-type]
    return Episode(task, turns, (*task.messages, {"role": "assistant", "content": reply, **message}), tools=tools)


def scored(name: str, task: Task, episode: Episode, **options: Any) -> dict[str, float | None]:
    """All columns of one reward, after its check of the task; `options` are those of reward.options."""
    function = REWARDS[name]
    bound = functools.update_wrapper(functools.partial(function, **options), function)
    bound.__signature__ = inspect.signature(functools.partial(function, **options))  # type: ignore[attr-defined]
    rewards = resolve_rewards(bound, None, {})
    rewards.check(task)
    return asyncio.run(rewards(task, episode))


def score(name: str, reply: str, answer: Any = None, /, **columns: Any) -> dict[str, float | None]:
    task = task_of(answer, **columns)
    return scored(name, task, episode_of(task, reply))
