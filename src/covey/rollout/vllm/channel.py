"""What the engine and its worker say to each other: JSON in frames, over a pair of connected sockets.

    engine → worker    {"do": "generate", "id": 7, "prompt": [..], "sampling": {..}}
    worker → engine    {"id": 7, "done": {..}}    or    {"id": 7, "error": "why"}

The first message is the settings, and its answer, with id 0, comes when the worker can work. Numbers come back as they
were: JSON keeps every bit of a float.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
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
