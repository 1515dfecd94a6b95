"""An MCP server for tests: `python mcp_server.py [PORT]`, over stdio without a port."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")
count = 0


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def fail(text: str) -> str:
    """Never works."""
    raise ToolError(text)


@server.tool()
def crash() -> str:
    """Takes the server down."""
    print("going down", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def hang() -> str:
    """Never answers."""
    time.sleep(600)
    return ""


@server.tool()
def tick() -> str:
    """How often this process was asked."""
    global count
    count += 1
    return f"{os.getpid()} {count}"


@server.tool(name="odd.name/x")
def odd() -> list[str]:
    return ["a", "b"]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
