"""Connections to MCP servers, over stdio or streamable HTTP.

A stdio server is a child process that reads and writes lines of JSON. It leads a process group. When the connection is
closed, its stdin is closed too, and a process that does not exit within GRACE seconds is killed with all its children;
if the task is cancelled in the meantime, at once.

The `mcp` package requires that the task that entered a context also exits it. So each connection is held by its own
task, which ends when the connection is closed, when it is no longer needed, or when the run's event loop ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

from covey.agents.tools.tool import ToolFailure, ToolMistake
from covey.errors import Absent, InputError, first_error
from covey.imports import install_extra, require

GRACE = 2.0  # seconds to exit after its stdin was closed
MAX_LINE = 64 * 2**20  # bytes


@asynccontextmanager
async def stdio_streams(
    command: Sequence[str], env: Mapping[str, str], cwd: str | None, errors: IO[str]
) -> AsyncIterator[tuple[Any, Any]]:
    """Start a server. Yields the streams that the package's client reads from and writes to."""
    import anyio
    from mcp.client.stdio import get_default_environment

    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        env=get_default_environment() | dict(env),
        cwd=cwd,
        limit=MAX_LINE,
        start_new_session=True,
    )
    received, incoming = anyio.create_memory_object_stream[Any](0)
    outgoing, to_send = anyio.create_memory_object_stream[Any](0)
    tasks = [asyncio.create_task(_receive(process, received)), asyncio.create_task(_send(process, to_send, received))]
    try:
        yield incoming, outgoing
    finally:
        try:
            await _stop(process)
        finally:  # nothing below awaits
            with suppress(ProcessLookupError):  # its children too, even if it has exited
                os.killpg(process.pid, signal.SIGKILL)
            for task in tasks:
                task.cancel()
            for stream in (received, incoming, outgoing, to_send):
                stream.close()


async def _receive(process: asyncio.subprocess.Process, received: Any) -> None:
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    assert process.stdout is not None
    # Closing the stream tells the client that the server has ended.
    with received, suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        async for line in process.stdout:
            try:
                message: Any = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
            except ValueError as error:
                message = error
            await received.send(message)


async def _send(process: asyncio.subprocess.Process, to_send: Any, received: Any) -> None:
    assert process.stdin is not None
    try:
        async for message in to_send:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()
    except OSError:  # the server has closed its stdin: the client must not wait for responses
        received.close()


async def _stop(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(GRACE):
            await process.wait()


# -- Servers -----------------------------------------------------------------------------------------------------------

Result = TypeVar("Result")

CAUSE = "mcp"  # of a ToolFailure
ADDRESS = re.compile(r"""(https?://)(?:[^\s/?#'"]*@)?([^\s?#'"]*)(?:[?#][^\s'"]*)?""")
MAX_TOOLS = 1000
MAX_STDERR = 500  # characters of a server's stderr in error messages


@dataclass(frozen=True)
class Server:
    """The address and settings of a server. It has either a `command` or a `url`."""

    name: str
    command: tuple[str, ...] = ()
    url: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)  # for a command, which inherits only PATH, HOME and the like
    cwd: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    headers_from_env: Mapping[str, str] = field(
        default_factory=dict
    )  # header → environment variable that holds its value
    per_episode: bool = False  # each episode has its own connection, and so its own state
    only: tuple[str, ...] = ()  # the tools to offer; empty: all
    prefix: str = ""  # put before the names of its tools
    seconds: float | None = None  # for one call; None: agent.tool_seconds
    max_output_tokens: int | None = None  # of one result; None: agent.max_tool_tokens
    start_seconds: float = 60.0  # for connecting

    @property
    def place(self) -> str:
        """The address for messages, without secrets that a URL or a command line may hold."""
        return self.command[0] if self.url is None else without_secrets(self.url)

    @asynccontextmanager
    async def open(self, errors: IO[str]) -> AsyncIterator[Any]:
        """A connected client of the package. The stderr of a stdio server goes to `errors`."""
        mcp = require_mcp()
        if self.url is None:
            async with mcp.Client(stdio_streams(self.command, self.env, self.cwd, errors)) as client:
                yield client
            return
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        async with (
            create_mcp_http_client(headers=self._headers()) as http,
            mcp.Client(streamable_http_client(self.url, http_client=http)) as client,
        ):
            yield client

    def _headers(self) -> dict[str, str]:
        for variable in self.headers_from_env.values():
            if variable not in os.environ:
                raise Absent(f"tool server {self.name}: the environment variable {variable} is not set")
        return {**self.headers, **{header: os.environ[name] for header, name in self.headers_from_env.items()}}


def require_mcp() -> Any:
    mcp = require("mcp", "mcp", "tool servers need the package mcp")
    if not hasattr(mcp, "Client"):
        raise Absent(f"tool servers need mcp 2 or newer\n  {install_extra('mcp', upgrade=True)}")
    if (log := logging.getLogger("mcp")).level == logging.NOTSET:
        log.setLevel(logging.CRITICAL)  # errors are reported by the call that they happen in
    return mcp


# -- Connections -------------------------------------------------------------------------------------------------------


class OpenConnection:
    """One connection and the task that holds it. A retired one accepts no new calls and ends after the last one."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.calls = 0  # in progress
        self.retired = False
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed in close())
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._ended = asyncio.Event()
        self.task = asyncio.create_task(self._hold(), name=f"tool server {server.name}")

    @property
    def usable(self) -> bool:
        return not self.retired and not self.task.done()

    async def _hold(self) -> None:
        try:
            async with self.server.open(self.errors) as client:
                self.ready.set_result(client)
                await self._ended.wait()
        except Exception as error:
            if not self.ready.done():
                self.ready.set_exception(error)
        finally:
            self.retired = True
            self.ready.cancel()

    def retire(self) -> None:
        self.retired = True
        if self.calls == 0:
            self._ended.set()

    async def close(self) -> None:
        self.retired = True
        self._ended.set()
        if not self.ready.done():
            self.task.cancel()
        await asyncio.wait([self.task])
        self.errors.close()

    def stderr_tail(self) -> str:
        self.errors.seek(0)
        text = self.errors.read()[-MAX_STDERR:].strip()
        return f"; it wrote: {text}" if text else ""


class Connection:
    """Calls a server. It connects at the first call, and again after a connection was lost."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._current: OpenConnection | None = None

    async def tools(self) -> list[Any]:
        """All pages of the server's list of tools."""

        async def list_all(client: Any) -> list[Any]:
            tools, cursor = [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                if len(tools) > MAX_TOOLS:
                    raise ToolFailure(CAUSE, f"the server {self.server.name} lists more than {MAX_TOOLS} tools")
                cursor = page.next_cursor
                if cursor is None:
                    return tools

        return await self._use("list_tools", list_all, self.server.start_seconds)

    async def call(self, tool: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        """The server's result. `ToolMistake` if it refuses the arguments, `ToolFailure` if it is down or too slow."""
        return await self._use(tool, lambda client: client.call_tool(tool, dict(arguments)), seconds)

    async def aclose(self) -> None:
        if self._current is not None:
            await self._current.close()

    async def _use(self, what: str, use: Callable[[Any], Awaitable[Result]], seconds: float) -> Result:
        mcp = require_mcp()
        if self._current is None or not self._current.usable:
            self._current = OpenConnection(self.server)
        connection = self._current
        connection.calls += 1
        try:
            client = await self._client(connection)
            async with asyncio.timeout(seconds):
                return await use(client)
        except TimeoutError:
            connection.retire()  # the server may hang forever
            raise self._failure(connection, f"{what} took longer than {seconds:g} s") from None
        except mcp.MCPError as error:
            if error.code == mcp.types.INVALID_PARAMS:
                raise ToolMistake("bad_arguments", f"error: {what}: {error.message}") from None
            connection.retire()
            raise self._failure(connection, f"{what}: {error.message}") from error
        except (InputError, ToolFailure):
            raise
        except Exception as error:
            connection.retire()
            raise self._failure(connection, f"{what}: {_cause(error)}") from error
        finally:
            connection.calls -= 1
            if connection.retired:
                connection.retire()

    async def _client(self, connection: OpenConnection) -> Any:
        try:
            async with asyncio.timeout(self.server.start_seconds):
                return await asyncio.shield(connection.ready)
        except TimeoutError:
            connection.task.cancel()
            raise self._failure(connection, f"connecting took longer than {self.server.start_seconds:g} s") from None
        except InputError:
            raise
        except Exception as error:
            raise self._failure(connection, f"connecting: {_cause(error)}") from error

    def _failure(self, connection: OpenConnection, text: str) -> ToolFailure:
        name, place = self.server.name, self.server.place
        label = name if name == place else f"{name} ({place})"
        return ToolFailure(CAUSE, f"tool server {label}: {without_secrets(text)}{connection.stderr_tail()}")


def without_secrets(text: str) -> str:
    """The text with URLs reduced to scheme, host and path, without users, passwords and queries."""
    return ADDRESS.sub(r"\1\2", text)


def _cause(error: BaseException) -> str:
    """The innermost error: task groups wrap it."""
    error = first_error(error)
    return f"{type(error).__name__}: {error}"
