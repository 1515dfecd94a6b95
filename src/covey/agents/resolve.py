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

from covey.agents.environment import EnvironmentAgent, beyond
from covey.agents.flow import FlowAgent
from covey.agents.formats import CodeFormat, Format, ReactFormat, choose_format
from covey.agents.turns import ChatAgent, ToolAgent, Toolbox
from covey.config.schema import AgentConfig
from covey.errors import InputError
from covey.imports import load_function, no_exit
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


# -- Which agent a run has, from its settings --------------------------------------------------------------------------
# chat     one answer                                   code     Python blocks, run in the sandbox
# hf       tool calls in the model's own format         flow     planner, executor, verifier, generator
# react    Thought / Action / Action Input              file.py:function   your own

CODE_TOOL = "python_executor"


def tool_names(config: AgentConfig) -> list[str]:
    """The tools that an agent is given. One that writes code has what runs it."""
    return config.tools or ([CODE_TOOL] if config.name == "code" else [])


def make_agent(config: AgentConfig, tools: Toolbox, tokenizer: Any = None, model_type: str = "") -> Agent:
    """`tokenizer`: whose template shows tools and calls; None where there is no model to ask."""
    schemas, name = tools.schemas(), config.name
    if name == "flow":
        return FlowAgent(tools, config.train_modules, config.max_turns)
    if name == "hf":
        return ToolAgent(tools, choose_format(config.format, tokenizer, model_type, schemas), config.max_turns)
    if name == "react":
        return ToolAgent(tools, ReactFormat(schemas), config.max_turns)
    if name == "code":
        return ToolAgent(tools, _code_format(tools), config.max_turns)
    if schemas:
        raise InputError(
            f"agent={name} uses no tools, but agent.tools={list(tools.tools.names)}\n"
            "  use agent=hf, react, code or flow"
        )
    return resolve_agent(name, config)


def _code_format(tools: Toolbox) -> Format:
    """A block of code is a call of the one tool that runs code; others have no way to be called."""
    names = tools.tools.names
    if names not in ((CODE_TOOL,), ("code_interpreter",)):
        raise InputError(
            f"agent=code runs Python blocks with {CODE_TOOL}, got agent.tools={list(names)}\n  leave it out"
        )
    return CodeFormat(names[0])
