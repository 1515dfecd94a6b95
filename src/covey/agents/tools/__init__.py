"""Tools: what they are, the built-in ones, choosing them, and running the calls of a turn."""

from covey.agents.tools.session import Bench, Runner, ToolResult
from covey.agents.tools.tool import Tool, ToolFailure, ToolMistake, tool
from covey.agents.tools.toolset import ToolSet, resolve_tools

__all__ = ["Bench", "Runner", "Tool", "ToolFailure", "ToolMistake", "ToolResult", "ToolSet", "resolve_tools", "tool"]
