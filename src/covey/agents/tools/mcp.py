"""Tools of MCP servers (Model Context Protocol).

    agent.tools='[calculator, mcp:https://host/mcp, "mcp:stdio:python server.py", mcp:files]'
    agent.tool_options='{files: {command: "npx -y @modelcontextprotocol/server-filesystem /data", per_episode: true}}'

A server's tools are listed once, before the run starts. The model sees the server's own names, descriptions and
schemas. Errors that a server reports for a call are shown to the model; a server that is down or too slow is a failure
of the episode, cause `mcp`. All episodes share one connection, unless the server keeps state per episode
(`per_episode`).
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

from covey.agents.tools.mcp_connection import CAUSE, Connection, Server, without_secrets
from covey.agents.tools.tool import STATE, Tool, ToolFailure, ToolMistake
from covey.errors import Absent, InputError, unknown

PREFIX = "mcp:"
STDIO = "stdio:"
MAX_SHOWN = 10  # mistakes of one call
OPTIONS = tuple(option.name for option in fields(Server) if option.name != "name")


@dataclass(frozen=True, eq=False)
class McpTool(Tool):
    """A tool of a server, with the schema that the server gives."""

    input_schema: Mapping[str, Any] = field(default_factory=dict)

    def schema(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": dict(self.input_schema)}
        return {"type": "function", "function": function}

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        from jsonschema import Draft202012Validator

        try:
            validator = Draft202012Validator(dict(self.input_schema))
            errors = list(islice(validator.iter_errors(dict(arguments)), MAX_SHOWN))
        except Exception as error:  # a broken or circular reference
            raise ToolFailure(CAUSE, f"the schema of {self.name}: {type(error).__name__}: {error!s:.200}") from error
        problems = [
            f"{'.'.join(map(str, error.absolute_path)) or 'arguments'}: {error.message:.500}" for error in errors
        ]
        if self.stateful and STATE in arguments:  # reserved for the episode's state, even if the schema allows it
            problems.append(f"{STATE}: there is no such argument")
        if problems:
            raise ToolMistake("bad_arguments", f"error: {self.name}: {'; '.join(problems)}\n{self.usage()}")
        return dict(arguments)

    def usage(self) -> str:
        required = set(self.input_schema.get("required", ()))
        parameters = [
            f"{name}: {_kind(schema)}" + ("" if name in required else " (optional)")
            for name, schema in self.input_schema.get("properties", {}).items()
        ]
        return f"expected: {self.name}({', '.join(parameters)})"

    def plain(self, checked: Mapping[str, Any]) -> dict[str, Any]:
        return dict(checked)


def _kind(schema: Any) -> str:
    """The type of a schema, which may also be `true` or `false`."""
    return str(schema.get("type", "any")) if isinstance(schema, Mapping) else "any"


def mcp_tools(name: str, options: Mapping[str, Any], seconds: float) -> list[Tool]:
    """The tools of the server `name` (`mcp:...`). `options` are agent.tool_options, `seconds` is agent.tool_seconds.
    The server is contacted now, on a separate event loop."""
    server = find_server(name, options)
    with ThreadPoolExecutor(1) as thread:
        offered = thread.submit(asyncio.run, _list_tools(server)).result()
    known = [tool.name for tool in offered]
    for tool_name in server.only:
        if tool_name not in known:
            raise unknown(f"tool of {server.name}", tool_name, known)
    shared = Connection(server)
    return [_tool(server, shared, tool, seconds) for tool in offered if not server.only or tool.name in server.only]


async def _list_tools(server: Server) -> list[Any]:
    connection = Connection(server)
    try:
        return await connection.tools()
    except ToolFailure as failure:
        raise Absent(f"{failure}\n  start it first, or correct its command or address") from failure
    finally:
        await connection.aclose()


def find_server(name: str, options: Mapping[str, Any]) -> Server:
    """`mcp:https://...`, `mcp:stdio:COMMAND`, or `mcp:NAME` with agent.tool_options.NAME."""
    place = name.removeprefix(PREFIX)
    if place.startswith(("http://", "https://")):
        return Server(without_secrets(place), url=place)
    if place.startswith(STDIO):
        command = _command(PREFIX + STDIO, place.removeprefix(STDIO))
        return Server(command[0], command=command)
    settings = options.get(place)
    if not isinstance(settings, Mapping):
        raise InputError(
            f"tool {name}: where is that server?\n"
            f"  fix: agent.tool_options='{{{place}: {{command: \"python server.py\"}}}}', or {{url: https://...}};\n"
            "  or name it directly: mcp:https://host/path, mcp:stdio:COMMAND"
        )
    for option in settings:
        if option not in OPTIONS:
            raise unknown(f"setting of {name}", str(option), OPTIONS)
    if ("command" in settings) == ("url" in settings):
        raise InputError(f"tool {name}: give command (a server to start) or url (one that runs), and not both")
    fields = {**settings, "only": tuple(settings.get("only", ()))}
    if "command" in fields:
        fields["command"] = _command(name, fields["command"])
    return Server(place, **fields)


def _command(tool: str, command: Any) -> tuple[str, ...]:
    words = tuple(shlex.split(command) if isinstance(command, str) else map(str, command))
    if not words:
        raise InputError(f"tool {tool}: its command is empty")
    return words


def _tool(server: Server, shared: Connection, offered: Any, seconds: float) -> Tool:
    schema = dict(offered.input_schema)
    _check_schema(server, offered.name, schema)
    limit = server.seconds or seconds
    if server.per_episode and STATE in schema.get("properties", {}):
        raise InputError(f"tool {offered.name} of {server.name} has a parameter {STATE}: per_episode is not possible")

    async def call(**arguments: Any) -> str:
        state = arguments.pop(STATE) if server.per_episode else {}
        connection = state.setdefault(f"{PREFIX}{server.name}", Connection(server)) if server.per_episode else shared
        return result_text(await connection.call(offered.name, arguments, limit))

    call.__name__ = name = server.prefix + re.sub(r"[^A-Za-z0-9_-]", "_", offered.name)
    return McpTool(
        name=name[:64],
        description=offered.description or offered.title or "",
        function=call,
        parameters=(),
        stateful=server.per_episode,
        timeout=limit + server.start_seconds,  # the connection has its own deadlines for connecting and for the call
        max_output_tokens=server.max_output_tokens,
        inline=True,
        input_schema=schema,
    )


def _check_schema(server: Server, name: str, schema: Mapping[str, Any]) -> None:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(schema)
        json.dumps(schema, ensure_ascii=False).encode()
    except (SchemaError, RecursionError, ValueError) as error:
        why = error.message if isinstance(error, SchemaError) else str(error)
        raise InputError(
            f"tool {name[:60]!r} of the server {server.name}: its inputSchema is not a JSON schema ({why:.200})\n"
            f"  fix the server, or exclude the tool: agent.tool_options.{server.name}.only=[...]"
        ) from None


def result_text(result: Any) -> str:
    """A result as text. A result that the server marks as an error is a mistake of the model."""
    parts = [_part(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    if result.is_error:
        raise ToolMistake("raised", text if text.lower().startswith("error") else f"error: {text}")
    return text


def _part(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    kind = getattr(block, "mime_type", None) or getattr(getattr(block, "resource", None), "mime_type", None)
    where = getattr(block, "uri", None) or getattr(getattr(block, "resource", None), "uri", None)
    return f"[{block.type}{f' {kind}' if kind else ''}{f' at {where}' if where else ''}]"
