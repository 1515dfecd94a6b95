"""A program that plays one episode: started with the episode's address and key in its environment.

It leads a process group of its own, which ends with it, or when its time is over.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from covey.errors import Absent, InputError
from covey.gateway.book import TOKEN, shown_task
from covey.gateway.live import Live

TAIL = 2000  # bytes of its output that are kept
LONGEST_TASK = 100_000  # bytes; the system takes no longer value in an environment


def split_command(command: str) -> tuple[str, ...]:
    """agent.command as words."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise InputError(f"agent.command={command!r}: {error}") from error
    if not words:
        raise InputError("agent.command is empty\n  example: agent.command='python my_agent.py'")
    return words


def require_program(command: str) -> None:
    name = split_command(command)[0]
    if shutil.which(name) is None:
        raise Absent(f"agent.command={command!r}: there is no program {name} here")


def environment(live: Live, url: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """OPENAI_BASE_URL, OPENAI_API_KEY, COVEY_EPISODE_URL and COVEY_TASK (JSON; not there where it would be too long)
    besides the run's own variables."""
    variables = {name: value for name, value in inherited.items() if name not in (TOKEN, "COVEY_TASK")}
    direct = ",".join(filter(None, (variables.get("NO_PROXY") or variables.get("no_proxy"), "127.0.0.1,localhost")))
    variables |= {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": live.key,
        "COVEY_EPISODE_URL": f"{url}/episodes/{live.id}",
        "NO_PROXY": direct,
        "no_proxy": direct,
    }
    task = json.dumps(shown_task(live.task), default=str)
    return variables | ({"COVEY_TASK": task} if len(task.encode()) <= LONGEST_TASK else {})


async def play(command: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str]:
    """Run a program to its end: its exit code and the end of what it wrote. Cancelled, it is killed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env=dict(variables),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    written = bytearray()
    reading = asyncio.create_task(_keep_tail(process.stdout, written))
    try:
        await process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has left behind ends too
        await process.wait()
        with suppress(TimeoutError):  # something that left the group may hold the pipe
            await asyncio.wait_for(reading, 1.0)
    assert process.returncode is not None
    return process.returncode, written.decode(errors="replace").strip()


async def _keep_tail(pipe: asyncio.StreamReader, written: bytearray) -> None:
    while piece := await pipe.read(65536):
        written += piece
        del written[:-TAIL]
