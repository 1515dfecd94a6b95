"""What the engine and its worker say to each other: JSON in frames, over a pair of connected sockets.

    engine → worker    {"do": "generate", "id": 7, "prompt": [..], "sampling": {..}}
    worker → engine    {"id": 7, "done": {..}}    or    {"id": 7, "error": "why"}

The first message is the settings, and its answer, with id 0, comes when the worker can work. Numbers come back as they
were: JSON keeps every bit of a float.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Message = dict[str, Any]

LENGTH = struct.Struct("!Q")


def frame(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> Message | None:
    """The next message; None when the other side has gone."""
    head = _exactly(connection, LENGTH.size)
    body = None if head is None else _exactly(connection, LENGTH.unpack(head)[0])
    return None if body is None else json.loads(body)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        try:
            part = connection.recv(min(count - len(found), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        found += part
    return bytes(found)


async def receive_async(reader: asyncio.StreamReader) -> Message | None:
    try:
        head = await reader.readexactly(LENGTH.size)
        return dict(json.loads(await reader.readexactly(LENGTH.unpack(head)[0])))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


# -- The worker's process: started with a socket and a file for its chatter, ended with all that it started itself -----
# It leads a process group, so that what it starts ends with it, and Ctrl-C at the terminal is the engine's to handle.
# When this process is gone, its end of the socket closes, and the worker ends by itself.

PATIENCE = 10.0  # seconds for an orderly end, and again before force
TAIL = 15  # lines of the log that an error shows


class WorkerProcess:
    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        on_message: Callable[[Message], None],
        on_end: Callable[[], None],
    ) -> None:
        """`command` gets the number of its socket as the last argument. The callbacks run on a thread of their own."""
        self.log = log
        self._socket, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log.open("wb") as chatter:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=chatter,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._sending = threading.Lock()
        self._on_message, self._on_end = on_message, on_end
        self._reader = threading.Thread(target=self._read, name="covey-vllm", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """To a worker that has gone nothing is sent: who waits for an answer hears of its end."""
        with self._sending, suppress(OSError):
            self._socket.sendall(frame(message))

    def _read(self) -> None:
        while (message := receive(self._socket)) is not None:
            self._on_message(message)
        self._on_end()

    def tail(self) -> str:
        """The last lines of what the worker printed."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return "\n".join(f"  | {line}" for line in lines[-TAIL:]) or "  | (it printed nothing)"

    def end(self) -> None:
        """Ask, then insist. Nothing of the worker's is left afterwards."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for insist in (None, signal.SIGTERM):
            if insist is not None:
                self._signal(insist)
            try:
                self._process.wait(PATIENCE)
                break
            except subprocess.TimeoutExpired:
                continue
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        self._socket.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # the whole group has gone
            os.killpg(self._process.pid, number)
