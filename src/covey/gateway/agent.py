"""agent=gateway: programs outside of this process play the attempts over HTTP.

With `agent.command`, one program is started for each attempt, with the episode's address and key in its environment. It
leads a process group, which is killed when it exits or when its time is up. On Linux, processes that left the group are
killed too: they are found by a variable in their environment that only this program's processes have.

Without a command, clients take attempts with POST /episodes. The server runs as long as the agent's context, which a
run keeps open from its first evaluation to its last.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.errors import Absent, EpisodeError, InputError
from covey.gateway.registry import TOKEN, EpisodeRules, OpenEpisode, Registry, public_task
from covey.gateway.server import Server
from covey.protocols import Policy
from covey.types import Episode, Messages, Task

KEPT_OUTPUT = 2000  # bytes at the end of a program's output
READ_SIZE = 1 << 16  # bytes read at once; a pipe holds no more
MARK = "COVEY_PROGRAM"  # environment variable of a program and of all processes that it starts
MAX_TASK = 100_000  # bytes; the system limits the length of an environment variable


def split_command(command: str) -> tuple[str, ...]:
    """agent.command as a list of words."""
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


def program_environment(episode: OpenEpisode, url: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The run's own environment with OPENAI_BASE_URL, OPENAI_API_KEY, COVEY_EPISODE_URL, and COVEY_TASK as JSON if it
    is not too long. Tokens that would give a program access to more than its episode are removed."""
    variables = {
        name: value
        for name, value in inherited.items()
        # Anyone with the token of a Ray cluster can run code there.
        if name not in (TOKEN, "COVEY_TASK") and not name.startswith("RAY_AUTH_")
    }
    no_proxy = ",".join(filter(None, (variables.get("NO_PROXY") or variables.get("no_proxy"), "127.0.0.1,localhost")))
    variables |= {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": episode.key,
        "COVEY_EPISODE_URL": f"{url}/episodes/{episode.id}",
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }
    task = json.dumps(public_task(episode.task, episode.rules.hidden), default=str)
    return variables | ({"COVEY_TASK": task} if len(task.encode()) <= MAX_TASK else {})


async def run_program(command: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str]:
    """Run a program to its end. Returns its exit code and the end of its output. Cancelling kills it.

    The pipe is our own: asyncio's `wait()` would last until every process that inherited the pipe has exited."""
    mark = secrets.token_hex(16)
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    loop, output = asyncio.get_running_loop(), bytearray()
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**variables, MARK: mark},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        loop.add_reader(read_end, lambda: _read_output(read_end, output) or loop.remove_reader(read_end))
        try:
            await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # processes that it left behind
            _kill_marked(mark)
            await process.wait()
        _read_output(read_end, output)
    finally:
        loop.remove_reader(read_end)
        os.close(read_end)
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace").strip()


def _read_output(pipe: int, output: bytearray) -> bool:
    """Read what is available and keep the end of it. False at the end of the pipe."""
    try:
        piece = os.read(pipe, READ_SIZE)
    except BlockingIOError:
        return True
    output += piece
    del output[:-KEPT_OUTPUT]
    return bool(piece)


def _kill_marked(mark: str) -> None:
    """Kill processes that left the program's group. Repeat, since one may fork in the meantime."""
    variable = f"{MARK}={mark}".encode()
    for _ in range(10):
        marked = [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if variable in _environment_of(folder)]
        if not marked:
            return
        for pid in marked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _environment_of(folder: Path) -> list[bytes]:
    """The environment of a process. Empty if it has exited or belongs to another user."""
    try:
        return (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


class Abandoned(EpisodeError):
    """No client took the attempt."""

    cause = "abandoned"


class ProgramFailed(EpisodeError):
    """The program exited with an error, or never called the model."""

    cause = "program"


class GatewayAgent:
    """Implements `covey.protocols.Agent`. `patience`: seconds without any client taking an attempt, after which waiting
    attempts fail. `programs`: how many run at once."""

    def __init__(
        self, rules: EpisodeRules, *, port: int, patience: float, command: str | None = None, programs: int = 16
    ) -> None:
        self.rules = rules
        self.port = port
        self.patience = patience
        self.command = split_command(command) if command is not None else None
        self.programs = programs
        self.announce: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
        self._registry: Registry | None = None
        self._server: Server | None = None
        self._slots: asyncio.Semaphore | None = None

    def hide_columns(self, columns: frozenset[str]) -> None:
        self.rules = replace(self.rules, hidden=columns)

    def announce_to(self, report: Callable[[str], None]) -> None:
        """Set the function that reports the address."""
        self.announce = report

    def opening(self, task: Task) -> tuple[Messages, Sequence[Mapping[str, Any]] | None]:
        """The task's messages. The program's real prompt is unknown, but usually begins with them."""
        return task.messages, None

    async def __aenter__(self) -> GatewayAgent:
        self._registry = Registry(self.rules, offers=self.command is None)
        self._slots = asyncio.Semaphore(self.programs)
        self._server = Server(self._registry, self.port)
        await self._server.start()
        if self.command is None:
            token = self._registry.shown_token
            self.announce(f"gateway: {self._server.url}   token: {token}   POST /episodes gives an attempt")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        await self._server.stop()

    async def run(self, policy: Policy, task: Task) -> Episode:
        assert self._registry is not None, "the gateway is open while the run is"
        episode = self._registry.open(policy, task)
        try:
            if self.command is not None:
                await self._run_program(episode, self.command)
            else:
                await self._wait_for_client(self._registry, episode)
        finally:
            self._registry.end(episode)
            await episode.wait_until_idle()
        if episode.error is not None:
            raise episode.error
        if not policy.turns:
            raise ProgramFailed("the episode was closed without a request to the model")
        return episode.to_episode()

    async def _wait_for_client(self, registry: Registry, episode: OpenEpisode) -> None:
        with episode.policy.waiting():
            taken = await registry.offer(episode, self.patience)
        if not taken:
            raise Abandoned(
                f"no client took an attempt in {self.patience:g} s (agent.max_seconds): is the program running?"
            )
        await episode.closed.wait()

    async def _run_program(self, episode: OpenEpisode, command: Sequence[str]) -> None:
        assert self._server is not None and self._slots is not None
        with episode.policy.waiting():
            await self._slots.acquire()
        try:
            code, output = await run_program(command, program_environment(episode, self._server.url, os.environ))
        finally:
            self._slots.release()
        if episode.error is not None or episode.limit_reached:  # not the program's fault: a request was refused
            return
        if code:
            raise ProgramFailed(f"{shlex.join(command)} ended with exit code {code}: {output[-500:] or 'no output'}")
