"""A tool server as a process of ours: lines of JSON through its stdin and stdout.

The process leads a group of its own. When the connection is left, its stdin is closed, and what has not ended soon
after is killed with all its children; when the task that holds it is cancelled meanwhile, at once.
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
from covey.imports import install_extra

GRACE = 2.0  # seconds to end by itself
LONGEST = 64 * 2**20  # bytes of a line


@asynccontextmanager
async def stdio_streams(
    command: Sequence[str], env: Mapping[str, str], cwd: str | None, errors: IO[str]
) -> AsyncIterator[tuple[Any, Any]]:
    """What the package's client reads from and writes to."""
    import anyio
    from mcp.client.stdio import get_default_environment

    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        env=get_default_environment() | dict(env),
        cwd=cwd,
        limit=LONGEST,
        start_new_session=True,
    )
    heard, reading = anyio.create_memory_object_stream[Any](0)
    writing, said = anyio.create_memory_object_stream[Any](0)
    tasks = [asyncio.create_task(_hear(process, heard)), asyncio.create_task(_say(process, said, heard))]
    try:
        yield reading, writing
    finally:
        try:
            await _end(process)
        finally:  # nothing below waits
            with suppress(ProcessLookupError):  # its children too, also where it has ended itself
                os.killpg(process.pid, signal.SIGKILL)
            for task in tasks:
                task.cancel()
            for stream in (heard, reading, writing, said):
                stream.close()


async def _hear(process: asyncio.subprocess.Process, heard: Any) -> None:
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    assert process.stdout is not None
    with heard, suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # closed: the client sees the end
        async for line in process.stdout:
            try:
                message: Any = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
            except ValueError as error:
                message = error
            await heard.send(message)


async def _say(process: asyncio.subprocess.Process, said: Any, heard: Any) -> None:
    assert process.stdin is not None
    try:
        async for message in said:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()
    except OSError:  # it reads no more: the client must not wait for answers
        heard.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(GRACE):
            await process.wait()


# -- Connections to tool servers that speak the Model Context Protocol, over stdio or streamable HTTP ------------------
# The package's contexts must be left by the task that entered them, so every connection is held by a task of its own,
# and ends with it: when it is closed, when nobody needs it any more, or when the event loop of the run ends. A stdio
# server is a process of ours: it ends with its connection.

Result = TypeVar("Result")

CAUSE = "mcp"  # of failures
ADDRESS = re.compile(r"""(https?://)(?:[^\s/?#'"]*@)?([^\s?#'"]*)(?:[?#][^\s'"]*)?""")
MOST_TOOLS = 1000
SHOWN = 500  # characters of what a server wrote to stderr, in a message about its end


@dataclass(frozen=True)
class Server:
    """Where a server is, and how it is used. One of `command` and `url` is given."""

    name: str
    command: tuple[str, ...] = ()
    url: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)  # for a command; it inherits PATH, HOME and the like only
    cwd: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    headers_from_env: Mapping[str, str] = field(default_factory=dict)  # header → environment variable with its value
    per_episode: bool = False  # a connection, and so a state, of each episode's own
    only: tuple[str, ...] = ()  # the tools to offer; empty: all
    prefix: str = ""  # before the names of its tools
    seconds: float | None = None  # one call may take this long; None: agent.tool_seconds
    max_output_tokens: int | None = None  # of one result; None: agent.max_tool_tokens
    start_seconds: float = 60.0  # connecting may take this long

    @property
    def place(self) -> str:
        """For messages: an address and a command line may hold keys."""
        return self.command[0] if self.url is None else without_secrets(self.url)

    @asynccontextmanager
    async def open(self, errors: IO[str]) -> AsyncIterator[Any]:
        """A connected client of the package. What a stdio server writes to stderr goes to `errors`."""
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
        absent = [variable for variable in self.headers_from_env.values() if variable not in os.environ]
        if absent:
            raise Absent(f"tool server {self.name}: the environment variable {absent[0]} is not set")
        return {**self.headers, **{header: os.environ[name] for header, name in self.headers_from_env.items()}}


def require_mcp() -> Any:
    try:
        import mcp
    except ImportError as error:
        raise InputError(f"tool servers need the package mcp\n  {install_extra('mcp')}") from error
    if not hasattr(mcp, "Client"):
        raise InputError(f"tool servers need mcp 2 or newer\n  {install_extra('mcp', upgrade=True)}")
    if (log := logging.getLogger("mcp")).level == logging.NOTSET:
        log.setLevel(logging.CRITICAL)  # what goes wrong is told once, in words, by the call that it happens to
    return mcp


class Line:
    """One connection and the task that holds it. A retired one takes no new calls, and ends when none is under way."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.busy = 0
        self.retired = False
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed with the line)
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._hold(), name=f"tool server {server.name}")

    @property
    def usable(self) -> bool:
        return not self.retired and not self.task.done()

    async def _hold(self) -> None:
        try:
            async with self.server.open(self.errors) as client:
                self.ready.set_result(client)
                await self._leave.wait()
        except Exception as error:
            if not self.ready.done():
                self.ready.set_exception(error)
        finally:
            self.retired = True
            self.ready.cancel()

    def retire(self) -> None:
        self.retired = True
        if self.busy == 0:
            self._leave.set()

    async def close(self) -> None:
        self.retired = True
        self._leave.set()
        if not self.ready.done():
            self.task.cancel()
        await asyncio.wait([self.task])
        self.errors.close()

    def last_words(self) -> str:
        self.errors.seek(0)
        text = self.errors.read()[-SHOWN:].strip()
        return f"; it wrote: {text}" if text else ""


class Connection:
    """A server that answers calls. It connects when first used, and again after the connection was lost."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._line: Line | None = None

    async def tools(self) -> list[Any]:
        """What the server offers, all pages of it."""

        async def listed(client: Any) -> list[Any]:
            found, cursor = [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                if len(found) > MOST_TOOLS:
                    raise ToolFailure(CAUSE, f"the server {self.server.name} lists more than {MOST_TOOLS} tools")
                cursor = page.next_cursor
                if cursor is None:
                    return found

        return await self._use("list_tools", listed, self.server.start_seconds)

    async def call(self, tool: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        """The server's result. `ToolMistake`: it refuses the arguments. `ToolFailure`: it is down, or too slow."""
        return await self._use(tool, lambda client: client.call_tool(tool, dict(arguments)), seconds)

    async def aclose(self) -> None:
        if self._line is not None:
            await self._line.close()

    async def _use(self, what: str, use: Callable[[Any], Awaitable[Result]], seconds: float) -> Result:
        mcp = require_mcp()
        line = self._connected()
        line.busy += 1
        try:
            client = await self._client(line)
            async with asyncio.timeout(seconds):
                return await use(client)
        except TimeoutError:
            line.retire()  # it may hang for good
            raise self._failure(line, f"{what} took longer than {seconds:g} s") from None
        except mcp.MCPError as error:
            if error.code == mcp.types.INVALID_PARAMS:
                raise ToolMistake("bad_arguments", f"error: {what}: {error.message}") from None
            line.retire()
            raise self._failure(line, f"{what}: {error.message}") from error
        except (InputError, ToolFailure):
            raise
        except Exception as error:
            line.retire()
            raise self._failure(line, f"{what}: {_told(error)}") from error
        finally:
            line.busy -= 1
            if line.retired:
                line.retire()

    def _connected(self) -> Line:
        if self._line is None or not self._line.usable:
            self._line = Line(self.server)
        return self._line

    async def _client(self, line: Line) -> Any:
        try:
            async with asyncio.timeout(self.server.start_seconds):
                return await asyncio.shield(line.ready)
        except TimeoutError:
            line.task.cancel()
            raise self._failure(line, f"connecting took longer than {self.server.start_seconds:g} s") from None
        except InputError:
            raise
        except Exception as error:
            raise self._failure(line, f"connecting: {_told(error)}") from error

    def _failure(self, line: Line, text: str) -> ToolFailure:
        name, place = self.server.name, self.server.place
        who = name if name == place else f"{name} ({place})"
        return ToolFailure(CAUSE, f"tool server {who}: {without_secrets(text)}{line.last_words()}")


def without_secrets(text: str) -> str:
    """With only scheme, host and path of the addresses in it: users, passwords and queries are left out."""
    return ADDRESS.sub(r"\1\2", text)


def _told(error: BaseException) -> str:
    """What went wrong at the bottom: task groups wrap it."""
    error = first_error(error)
    return f"{type(error).__name__}: {error}"
