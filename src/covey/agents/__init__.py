"""Agents: what happens between a task and its last answer. They think in messages and token ids, not in tensors."""

from covey.agents.chat import ChatAgent
from covey.agents.custom import FunctionAgent, agent, resolve_agent
from covey.agents.environment import EnvironmentAgent
from covey.agents.resolve import make_agent, tool_names
from covey.agents.toolbox import Toolbox
from covey.agents.turns import ToolAgent

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
