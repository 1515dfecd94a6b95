"""Agents of your own: any coroutine that talks to a policy.

    @covey.agent
    async def twice(policy, task):
        draft = await policy.chat(task.messages)
        ...
        return await policy.chat([*task.messages, {"role": "assistant", "content": draft}, ...])

What it returns (a string, or messages) is the final answer; every turn it took is trained on, token for token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from covey.agents.chat import ChatAgent
from covey.errors import InputError
from covey.plugins import load_function
from covey.protocols import Agent, NoRoom, Policy
from covey.types import Episode, Messages, StopReason, Task

AGENTS: dict[str, Callable[[], Agent]] = {"chat": ChatAgent}


class FunctionAgent:
    """A coroutine as an agent."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not inspect.iscoroutinefunction(function):
            name = getattr(function, "__name__", function)
            raise InputError(f"agent {name} must be a coroutine:  async def {name}(policy, task)")
        self.function = function

    def opening(self, task: Task) -> tuple[Messages, None]:
        return task.messages, None

    async def run(self, policy: Policy, task: Task) -> Episode:
        try:
            answer = await self.function(policy, task)
        except NoRoom:  # it wanted to say more than an episode may
            return Episode(task, tuple(policy.turns), task.messages, stop=StopReason.LENGTH)
        turns = tuple(policy.turns)
        if not turns:
            raise ValueError("the agent returned without asking the policy for anything")
        messages = (*task.messages, {"role": "assistant", "content": answer}) if isinstance(answer, str) else answer
        return Episode(task, turns, tuple(messages), stop=turns[-1].stop)


def agent(function: Callable[..., Any]) -> FunctionAgent:
    """Make an agent of `async def name(policy, task) -> str | messages`."""
    return FunctionAgent(function)


def resolve_agent(name: str) -> Agent:
    """chat, or `module:function`, or `file.py:function`."""
    if name in AGENTS:
        return AGENTS[name]()
    if ":" not in name:
        raise InputError(f"unknown agent  {name}\n  known: {', '.join(AGENTS)}, or your own as file.py:function")
    found = load_function("agent", name)
    return found if isinstance(found, FunctionAgent) else FunctionAgent(found)
