"""Agents: what happens between a task and its last answer. They think in messages and token ids, not in tensors."""

from covey.agents.environment import EnvironmentAgent
from covey.agents.resolve import FunctionAgent, agent, make_agent, resolve_agent, tool_names
from covey.agents.turns import ChatAgent, ToolAgent, Toolbox

__all__ = [
    "ChatAgent",
    "EnvironmentAgent",
    "FunctionAgent",
    "ToolAgent",
    "Toolbox",
    "agent",
    "make_agent",
    "resolve_agent",
    "tool_names",
]
