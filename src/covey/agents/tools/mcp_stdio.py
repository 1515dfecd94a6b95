"""A tool server as a process of ours: lines of JSON through its stdin and stdout.

The process leads a group of its own. When the connection is left, its stdin is closed, and what has not ended soon
after is killed with all its children; when the task that holds it is cancelled meanwhile, at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import IO, Any

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
