"""Tools: built-in ones, functions of the user, tools of MCP servers; and running the calls of a turn."""

from covey.agents.tools.session import ToolResult, ToolSession
from covey.agents.tools.tool import Tool, ToolFailure, ToolMistake, tool
from covey.agents.tools.toolset import ToolSet, resolve_tools

__all__ = [
    "Tool",
    "ToolFailure",
    "ToolMistake",
    "ToolResult",
    "ToolSession",
    "ToolSet",
    "resolve_tools",
    "tool",
]
