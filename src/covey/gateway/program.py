"""A program that plays one episode: started with the episode's address and key in its environment.

It leads a process group of its own, which ends with it, or when its time is over. On Linux so does what has left the
group: whatever was started with the program's environment is found by a variable that only this program has.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from covey.errors import Absent, InputError
from covey.gateway.book import TOKEN, shown_task
from covey.gateway.live import Live

TAIL = 2000  # bytes of its output that are kept
PIECE = 1 << 16  # bytes of it that are read at once
MARK = "COVEY_PROGRAM"  # in the environment of a program and of all it starts
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
    variables = {name: value for name, value in inherited.items() if not _kept_back(name)}
    direct = ",".join(filter(None, (variables.get("NO_PROXY") or variables.get("no_proxy"), "127.0.0.1,localhost")))
    variables |= {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": live.key,
        "COVEY_EPISODE_URL": f"{url}/episodes/{live.id}",
        "NO_PROXY": direct,
        "no_proxy": direct,
    }
    task = json.dumps(shown_task(live.task, live.rules.hidden), default=str)
    return variables | ({"COVEY_TASK": task} if len(task.encode()) <= LONGEST_TASK else {})


def _kept_back(name: str) -> bool:
    """What would let a program in elsewhere: who has a Ray cluster's token can run anything there."""
    return name in (TOKEN, "COVEY_TASK") or name.startswith("RAY_AUTH_")


async def play(command: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str]:
    """Run a program to its end: its exit code and the end of what it wrote. Cancelled, it is killed.

    The pipe is ours, not asyncio's: its wait() would last until everyone who holds the pipe has ended."""
    mark = secrets.token_hex(16)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    loop, written = asyncio.get_running_loop(), bytearray()
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**variables, MARK: mark},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(writing)
        loop.add_reader(reading, lambda: _keep_tail(reading, written) or loop.remove_reader(reading))
        try:
            await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has left behind ends too
            _kill_marked(mark)
            await process.wait()
        _keep_tail(reading, written)  # a full pipe is one piece
    finally:
        loop.remove_reader(reading)
        os.close(reading)
    assert process.returncode is not None
    return process.returncode, written.decode(errors="replace").strip()


def _keep_tail(pipe: int, written: bytearray) -> bool:
    """Read what is there. False at the end of the pipe."""
    try:
        piece = os.read(pipe, PIECE)
    except BlockingIOError:
        return True
    written += piece
    del written[:-TAIL]
    return bool(piece)


def _kill_marked(mark: str) -> None:
    """Kill what has left the program's group, until there is no more: one may start another meanwhile."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(10):
        found = [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if wanted in _environment_of(folder)]
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _environment_of(folder: Path) -> list[bytes]:
    """Of a process, as it was started. None for one that is gone, has ended, or is somebody else's."""
    try:
        return (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
