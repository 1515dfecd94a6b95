"""Which agent a run has, from its settings.

chat     one answer                                   code     Python blocks, run in the sandbox
hf       tool calls in the model's own format         flow     planner, executor, verifier, generator
react    Thought / Action / Action Input              file.py:function   your own
"""

from __future__ import annotations

from typing import Any

from covey.agents.custom import resolve_agent
from covey.agents.flow import FlowAgent
from covey.agents.formats import CodeFormat, Format, ReactFormat, choose_format
from covey.agents.toolbox import Toolbox
from covey.agents.turns import ToolAgent
from covey.config.schema import AgentConfig
from covey.errors import InputError
from covey.protocols import Agent

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
