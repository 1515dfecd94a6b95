"""The agent of a run, from its settings.

    chat     one answer                                   code     Python blocks, run in the sandbox
    hf       tool calls in the model's own format         flow     planner, executor, verifier, generator
    react    Thought / Action / Action Input              gui      mouse and keyboard on a web page
    file.py:function   your own

An agent of the user is a coroutine that talks to a policy, an object with `run` and `opening`, or an environment (a
class with `reset` and `step`, see `covey.agents.environment`):

    @covey.agent
    async def twice(policy, task):
        draft = await policy.chat(task.messages)
        ...
        return await policy.chat([*task.messages, {"role": "assistant", "content": draft}, ...])

The string or the messages that a coroutine returns are the final answer. All of its turns are trained on, token for
token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from covey.agents.turns import ChatAgent, ToolAgent, Toolbox
from covey.config.schema import AgentConfig
from covey.errors import InputError
from covey.imports import load_function, no_exit
from covey.protocols import Agent, NoRoom, Policy
from covey.types import Episode, Messages, StopReason, Task


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
        except NoRoom:  # the tokens of the episode are used up
            turns = tuple(policy.turns)
            last = [{"role": "assistant", "content": policy.decode(turn.completion_ids)} for turn in turns[-1:]]
            return Episode(task, turns, (*task.messages, *last), stop=StopReason.LENGTH)
        turns = tuple(policy.turns)
        if not turns:
            raise ValueError("the agent returned without asking the policy for anything")
        from covey.agents.environment import without_task

        is_text = isinstance(answer, str)
        own = [{"role": "assistant", "content": answer}] if is_text else without_task(answer, task.messages)
        return Episode(task, turns, (*task.messages, *own), stop=turns[-1].stop)


def agent(function: Callable[..., Any]) -> FunctionAgent:
    """Make an agent of `async def name(policy, task) -> str | messages`."""
    return FunctionAgent(function)


# -- Agents by name ----------------------------------------------------------------------------------------------------


def resolve_agent(name: str, config: AgentConfig | None = None) -> Agent:
    """chat, verifiers, or `module:function` or `file.py:function`: a coroutine, an agent, or an environment."""
    config = config or AgentConfig()
    if name == "chat":
        return ChatAgent()
    if name == "verifiers":
        from covey.agents.verifiers import load_verifiers

        return load_verifiers(config)
    if ":" not in name:
        raise InputError(f"unknown agent  {name}\n  known: chat, verifiers, or your own as file.py:function")
    return as_agent(name, load_function("agent", name), config)


def as_agent(name: str, value: Any, config: AgentConfig) -> Agent:
    """An object of the user as an agent."""
    from covey.agents.environment import EnvironmentAgent

    if inspect.isclass(value):
        if _is_environment(value):
            return EnvironmentAgent(value, config.max_turns, config.tool_seconds, train_roles=config.train_roles)
        if not callable(getattr(value, "run", None)):
            raise InputError(f"agent {name}: a class is an environment (reset and step) or an agent (opening and run)")
        with no_exit(f"agent {name}"):
            value = value()
    if callable(getattr(value, "run", None)):
        if not callable(getattr(value, "opening", None)):
            raise InputError(f"agent {name} has run but no opening\n  fix: def opening(self, task): messages, tools")
        agent: Agent = value
        return agent
    if _is_environment(value):
        raise InputError(
            f"agent {name} is one environment, and every episode needs its own\n  fix: name the class, or a function"
            " that makes one"
        )
    if _is_factory(value):
        return EnvironmentAgent(value, config.max_turns, config.tool_seconds, train_roles=config.train_roles)
    return FunctionAgent(value)


def _is_environment(value: Any) -> bool:
    return all(callable(getattr(value, method, None)) for method in ("reset", "step"))


def _is_factory(value: Any) -> bool:
    """Whether a function can be called without arguments and so makes environments. A coroutine agent takes two."""
    if not callable(value) or inspect.iscoroutinefunction(value):
        return False
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(value).parameters.values()
    return all(parameter.default is not parameter.empty or parameter.kind in variadic for parameter in parameters)


CODE_TOOL = "python_executor"


def tool_names(config: AgentConfig) -> list[str]:
    """The tools of an agent. The code agent has python_executor unless the settings name another; gui has none."""
    if config.name == "gui":
        return []
    return config.tools or ([CODE_TOOL] if config.name == "code" else [])


def make_agent(
    config: AgentConfig, tools: Toolbox, tokenizer: Any = None, model_type: str = "", vision: Any = None
) -> Agent:
    """The agent of the settings. The chat template of `tokenizer` shows tools and calls; None without a model. `vision`
    is the image processor of a vision-language model."""
    schemas, name = tools.schemas(), config.name
    if name == "flow":
        from covey.agents.flow import FlowAgent

        return FlowAgent(tools, config.train_modules, config.max_turns, config.opponents)
    if name == "hf":
        from covey.agents.formats.detect import choose_format

        return ToolAgent(tools, choose_format(config.format, tokenizer, model_type, schemas), config.max_turns)
    if name == "react":
        from covey.agents.formats.react import ReactFormat

        return ToolAgent(tools, ReactFormat(schemas), config.max_turns)
    if name == "gui":
        from covey.agents.gui.agent import make_gui

        return make_gui(config, vision)
    names = tools.tools.names
    if name == "code":
        from covey.agents.formats.code import TOOLS, CodeFormat

        if len(names) != 1 or names[0] not in TOOLS:
            raise InputError(
                f"agent=code runs Python blocks with {CODE_TOOL}, got agent.tools={list(names)}\n  leave it out"
            )
        return ToolAgent(tools, CodeFormat(names[0]), config.max_turns)
    if schemas:
        raise InputError(
            f"agent={name} uses no tools, but agent.tools={list(names)}\n  use agent=hf, react, code or flow"
        )
    return resolve_agent(name, config)
