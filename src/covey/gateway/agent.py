"""agent=gateway: attempts are played by programs outside, over HTTP.

Programs come for attempts (POST /episodes), or one is started for each (`agent.command`). The server lives as long as
the agent's context, which a run keeps open from its first evaluation to its last.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.errors import EpisodeError
from covey.gateway.book import Book
from covey.gateway.live import Live, Rules
from covey.gateway.program import environment, play, split_command
from covey.gateway.server import Server
from covey.protocols import Policy
from covey.types import Episode, Messages, Task


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
