"""Agents: what happens between a task and its last answer. They think in messages and token ids, not in tensors."""

from covey.agents.chat import ChatAgent
from covey.agents.custom import FunctionAgent, agent, resolve_agent
from covey.agents.environment import EnvironmentAgent

__all__ = ["ChatAgent", "EnvironmentAgent", "FunctionAgent", "agent", "resolve_agent"]
