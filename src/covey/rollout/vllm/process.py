"""The vLLM worker's process, and the messages between it and the engine: JSON in length-prefixed frames over a socket
pair.

    engine → worker    {"do": "generate", "id": 7, "prompt": [..], "sampling": {..}, "images": [..]}
    worker → engine    {"id": 7, "done": {..}}    or    {"id": 7, "error": "why"}

The first message is the settings; its reply, with id 0, says that the worker is ready. JSON keeps every bit of a float.
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
    """The next message; None if the other side has closed the connection."""
    header = _read_exactly(connection, LENGTH.size)
    body = None if header is None else _read_exactly(connection, LENGTH.unpack(header)[0])
    return None if body is None else json.loads(body)


def _read_exactly(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        try:
            part = connection.recv(min(count - len(data), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)


async def receive_async(reader: asyncio.StreamReader) -> Message | None:
    try:
        header = await reader.readexactly(LENGTH.size)
        return dict(json.loads(await reader.readexactly(LENGTH.unpack(header)[0])))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


# -- The worker's process --------------------------------------------------------------------------------------------

PATIENCE = 10.0  # seconds to wait for an orderly end, and again before SIGKILL
TAIL = 15  # lines of the log in an error message


class WorkerProcess:
    """Leads a process group, so that its children end with it and Ctrl-C at the terminal reaches only the engine. If
    this process dies, its end of the socket closes and the worker ends by itself."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        on_message: Callable[[Message], None],
        on_end: Callable[[], None],
    ) -> None:
        """`command` gets the file descriptor of its socket as the last argument. The callbacks run on a reader
        thread."""
        self.log = log
        self._socket, remote = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with remote, log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, str(remote.fileno())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(remote.fileno(),),
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
        """Send a message. Does nothing if the worker has ended: `on_end` then resolves pending requests."""
        with self._sending, suppress(OSError):
            self._socket.sendall(frame(message))

    def _read(self) -> None:
        while (message := receive(self._socket)) is not None:
            self._on_message(message)
        self._on_end()

    def tail(self) -> str:
        """The last lines that the worker printed."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return "\n".join(f"  | {line}" for line in lines[-TAIL:]) or "  | (it printed nothing)"

    def end(self) -> None:
        """Close the connection, then SIGTERM, then SIGKILL to the whole process group."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for number in (None, signal.SIGTERM):
            if number is not None:
                self._signal(number)
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
        with suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self._process.pid, number)
