"""Agents of your own: any coroutine that talks to a policy, or an environment.

    @covey.agent
    async def twice(policy, task):
        draft = await policy.chat(task.messages)
        ...
        return await policy.chat([*task.messages, {"role": "assistant", "content": draft}, ...])

What it returns (a string, or messages) is the final answer; every turn it took is trained on, token for token.
A class with `reset` and `step` is an environment (`covey.agents.environment`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from covey.agents.chat import ChatAgent
from covey.agents.environment import EnvironmentAgent, beyond
from covey.config.schema import AgentConfig
from covey.errors import InputError
from covey.plugins import load_function, no_exit
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
            turns = tuple(policy.turns)
            said = [{"role": "assistant", "content": policy.decode(turn.completion_ids)} for turn in turns[-1:]]
            return Episode(task, turns, (*task.messages, *said), stop=StopReason.LENGTH)
        turns = tuple(policy.turns)
        if not turns:
            raise ValueError("the agent returned without asking the policy for anything")
        own = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else beyond(answer, task.messages)
        return Episode(task, turns, (*task.messages, *own), stop=turns[-1].stop)


def agent(function: Callable[..., Any]) -> FunctionAgent:
    """Make an agent of `async def name(policy, task) -> str | messages`."""
    return FunctionAgent(function)


def resolve_agent(name: str, config: AgentConfig | None = None) -> Agent:
    """chat, or `module:function`, or `file.py:function`: a coroutine, an agent, or an environment's class."""
    config = config or AgentConfig()
    if name in AGENTS:
        return AGENTS[name]()
    if name == "verifiers":
        from covey.agents.verifiers import load_verifiers

        return load_verifiers(config)
    if ":" not in name:
        known = ", ".join([*AGENTS, "verifiers"])
        raise InputError(f"unknown agent  {name}\n  known: {known}, or your own as file.py:function")
    return as_agent(name, load_function("agent", name), config)


def as_agent(name: str, found: Any, config: AgentConfig) -> Agent:
    """What a user's name stands for, as an agent."""
    if inspect.isclass(found):
        if _is_environment(found):
            return EnvironmentAgent(found, config.max_turns, config.tool_seconds)
        if not callable(getattr(found, "run", None)):
            raise InputError(f"agent {name}: a class is an environment (reset and step) or an agent (opening and run)")
        with no_exit(f"agent {name}"):
            found = found()
    if callable(getattr(found, "run", None)):
        if not callable(getattr(found, "opening", None)):
            raise InputError(f"agent {name} has run but no opening\n  fix: def opening(self, task): messages, tools")
        agent: Agent = found
        return agent
    if _is_environment(found):
        raise InputError(
            f"agent {name} is one environment, and every episode needs its own\n  fix: name the class, or a function"
            " that makes one"
        )
    if _is_factory(found):
        return EnvironmentAgent(found, config.max_turns, config.tool_seconds)
    return FunctionAgent(found)


def _is_environment(found: Any) -> bool:
    return all(callable(getattr(found, method, None)) for method in ("reset", "step"))


def _is_factory(found: Any) -> bool:
    """A function that can be called without arguments makes environments; a coroutine agent takes two."""
    if not callable(found) or inspect.iscoroutinefunction(found):
        return False
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(found).parameters.values()
    return all(parameter.default is not parameter.empty or parameter.kind in kinds for parameter in parameters)
