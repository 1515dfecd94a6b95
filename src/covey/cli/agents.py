"""The parts of a run that play its episodes: tools, the sandbox, the agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from covey.agents import Toolbox, make_agent, tool_names
from covey.agents.tools import ToolSet, resolve_tools
from covey.cli.gateway import make_gateway
from covey.config.schema import Config
from covey.protocols import Agent
from covey.sandbox import Sandbox

if TYPE_CHECKING:
    from covey.learner.models import ModelSource

RUNS_CODE = {"python_executor", "code_interpreter", "code_reward"}


def make_sandbox(config: Config, reward: Any = None) -> Sandbox | None:
    """Where code of the model's runs, if any does: by a tool, an agent or a reward."""
    asked = reward or config.reward.name
    rewards = list(asked) if isinstance(asked, (list, tuple)) else [asked]
    runs = any(isinstance(name, str) and name in RUNS_CODE for name in (*tool_names(config.agent), *rewards))
    return Sandbox.of(config.sandbox) if runs else None


def make_toolbox(config: Config, sandbox: Sandbox | None) -> Toolbox:
    agent = config.agent
    tools = resolve_tools(tool_names(agent), agent.tool_options, sandbox=sandbox)
    return Toolbox(tools, max_tokens=agent.max_tool_tokens, seconds=agent.tool_seconds)


def find_agent(config: Config, toolbox: Toolbox | None, source: ModelSource | None) -> Agent:
    if config.agent.name == "gateway":
        return make_gateway(config, source)
    toolbox = toolbox or Toolbox(ToolSet(()))  # tools that are not on this machine
    if source is None:
        return make_agent(config.agent, toolbox)
    return make_agent(config.agent, toolbox, source.tokenizer, source.config.model_type)
