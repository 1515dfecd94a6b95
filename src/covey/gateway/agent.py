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
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from covey.errors import Absent, EpisodeError, InputError
from covey.gateway.registry import TOKEN, Book, Live, Rules, shown_task
from covey.gateway.server import Server
from covey.protocols import Policy
from covey.types import Episode, Messages, Task

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


# -- agent=gateway: attempts are played by programs outside, over HTTP -------------------------------------------------
# Programs come for attempts (POST /episodes), or one is started for each (`agent.command`). The server lives as long as
# the agent's context, which a run keeps open from its first evaluation to its last.


class Abandoned(EpisodeError):
    """Nobody came for the attempt."""

    cause = "abandoned"


class ProgramFailed(EpisodeError):
    """The program ended badly, or asked the model nothing."""

    cause = "program"


class GatewayAgent:
    """Implements `covey.protocols.Agent`. `patience`: seconds without anybody coming for an attempt after which those
    that wait are given up. `programs`: how many run at once."""

    def __init__(
        self, rules: Rules, *, port: int, patience: float, command: str | None = None, programs: int = 16
    ) -> None:
        self.rules = rules
        self.port = port
        self.patience = patience
        self.command = split_command(command) if command is not None else None
        self.programs = programs
        self.announce: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
        self._book: Book | None = None
        self._server: Server | None = None
        self._places: asyncio.Semaphore | None = None

    def opening(self, task: Task) -> tuple[Messages, Sequence[Mapping[str, Any]] | None]:
        """What the program will write is not known; most begin with the task."""
        return task.messages, None

    async def __aenter__(self) -> GatewayAgent:
        self._book = Book(self.rules, offers=self.command is None)
        self._places = asyncio.Semaphore(self.programs)
        self._server = Server(self._book, self.port)
        await self._server.start()
        if self.command is None:
            self.announce(
                f"gateway: {self._server.url}   token: {self._book.shown_token}   POST /episodes gives an attempt"
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        await self._server.stop()

    async def run(self, policy: Policy, task: Task) -> Episode:
        assert self._book is not None, "the gateway is open while the run is"
        live = self._book.open(policy, task)
        try:
            if self.command is not None:
                await self._start_program(live, self.command)
            else:
                await self._hand_over(live)
        finally:
            self._book.end(live)
            await live.settled()
        if live.error is not None:
            raise live.error
        if not policy.turns:
            raise ProgramFailed("the episode was closed without anything asked of the model")
        return live.episode()

    async def _hand_over(self, live: Live) -> None:
        assert self._book is not None
        with live.policy.waiting():
            taken = await self._book.offer(live, self.patience)
        if not taken:
            raise Abandoned(
                f"nobody came for an attempt in {self.patience:g} s (agent.max_seconds): is the program running?"
            )
        await live.closed.wait()

    async def _start_program(self, live: Live, command: Sequence[str]) -> None:
        assert self._server is not None and self._places is not None
        with live.policy.waiting():
            await self._places.acquire()
        try:
            code, output = await play(command, environment(live, self._server.url, os.environ))
        finally:
            self._places.release()
        if live.error is not None or live.used_up:  # not the program's fault: it could not be answered
            return
        if code:
            raise ProgramFailed(f"{shlex.join(command)} ended with exit code {code}: {output[-500:] or 'no output'}")
