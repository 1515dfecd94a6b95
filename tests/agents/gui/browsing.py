"""Real browsers for the tests of agent=gui, and a policy that plays a script."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from covey.agents.gui.actions import FORMATS
from covey.agents.gui.agent import GuiAgent, find_chromium
from covey.protocols import Reply
from covey.types import StopReason, Task, Turn
from covey.workers import WorkerPool

CHROMIUM = find_chromium(None)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="chromium or playwright is not installed: apt-get install chromium, covey[gui]",
)
TURN = Turn((1,), (2,), (0.0,), (0,), StopReason.EOS)

Script = Sequence[str] | Callable[[Sequence[Mapping[str, Any]]], Awaitable[str]]


class ScriptedPolicy:
    """Replies with its texts in order, or with what a function of the messages returns, and keeps the messages."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.turns: list[Turn] = []
        self.asked: list[Sequence[Mapping[str, Any]]] = []

    def waiting(self) -> Any:
        return nullcontext()

    async def ask(self, messages: Sequence[Mapping[str, Any]]) -> Reply:
        self.asked.append(list(messages))
        self.turns.append(TURN)
        if callable(self.script):
            return Reply(await self.script(messages), StopReason.EOS)
        return Reply(self.script[len(self.turns) - 1], StopReason.EOS)


def call(action: str, **arguments: Any) -> str:
    made = json.dumps({"name": "computer_use", "arguments": {"action": action, **arguments}})
    return f"<tool_call>\n{made}\n</tool_call>"


def page(html: str, success: str = "true", **columns: Any) -> Task:
    columns = {"html": html, "success": success, "viewport": [320, 240], **columns}
    return Task("page", ({"role": "user", "content": "Do it."},), columns={k: v for k, v in columns.items() if v})


@contextmanager
def gui(**settings: Any) -> Iterator[GuiAgent]:
    """The agent with its workers. The browsers end in `playing`, or with the workers."""
    settings = {"format": FORMATS["computer_use"], "executable": CHROMIUM or "", "max_turns": 8, **settings}
    agent = GuiAgent(**settings)
    workers = WorkerPool(agent.functions)
    try:
        yield agent.in_workers(workers)
    finally:
        workers.close()


def play(task: Task, script: Script, **settings: Any) -> tuple[Any, ScriptedPolicy]:
    """One episode of a task."""
    policy = ScriptedPolicy(script)

    async def run(agent: GuiAgent) -> Any:
        async with agent:
            return await agent.run(policy, task)  # type: ignore[arg-type]

    with gui(**settings) as agent:
        return asyncio.run(run(agent)), policy


class Listener:
    """A TCP and a UDP socket on this machine, on which nothing may arrive."""

    def __init__(self) -> None:
        self.tcp, self.udp = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
        self.tcp.bind(("127.0.0.1", 0))
        self.port = self.tcp.getsockname()[1]
        self.udp.bind(("127.0.0.1", self.port))
        self.tcp.listen()
        self.received: list[str] = []
        for watch in (self._accept, self._receive):
            threading.Thread(target=watch, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.tcp.accept()
            except OSError:
                return
            connection.settimeout(0.5)
            try:
                self.received.append(f"tcp {connection.recv(200)!r}")
            except OSError:
                self.received.append("tcp")
            connection.close()

    def _receive(self) -> None:
        while True:
            try:
                data, sender = self.udp.recvfrom(200)
            except OSError:
                return
            if sender is None:  # it was closed
                return
            self.received.append(f"udp {data!r}")

    def close(self) -> None:
        for one in (self.tcp, self.udp):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def chromium_processes() -> list[int]:
    """The ids of all Chromium processes that these tests started: their profiles are in this folder."""
    profiles = f"{tempfile.gettempdir()}/covey-browser-".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if profiles in command:
            found.append(int(folder.name))
    return found
