"""What travels between the pool, its template process and the workers.

    pool → worker      length, then pickled ("call", function, args, kwargs) and the like
    worker → pool      length, then a byte (what became of it), a byte (keep the worker or not), and pickled the value
    pool → template    SPAWN with a worker's number and its end of a socket pair, or KILL with a number
    template → pool    a worker's number, how it ended as waitpid tells it, and the last that it printed

All ends are forks of one process and trust each other. A worker runs functions that may write anywhere, though: what
is no frame is refused before memory is given to it.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

LENGTH = struct.Struct("!Q")
ORDER = struct.Struct("!cI")
REPORT = struct.Struct("!IiI")
SPAWN, KILL = b"s", b"k"
DONE, RAISED = 0, 1

LARGEST = 1 << 30  # bytes of one value
CHUNK = 1 << 18  # bytes that are read at once: about what a socket holds
NOT_STARTED = -1  # in a report: there never was such a process


def framed(prefix: bytes, value: Any) -> memoryview:
    """A whole frame. Raises whatever the value's own pickling raises."""
    stream = io.BytesIO()
    stream.write(bytes(LENGTH.size) + prefix)
    pickle.dump(value, stream, protocol=pickle.HIGHEST_PROTOCOL)
    length = stream.tell() - LENGTH.size
    if length > LARGEST:
        raise ValueError(f"{length >> 20} MiB are more than the {LARGEST >> 20} MiB that may be sent at once")
    whole = stream.getbuffer()
    LENGTH.pack_into(whole, 0, length)
    return whole


class NoFrame(Exception):
    """Bytes that nobody here would have sent."""


class Inbox:
    """Bytes as they come in → one frame."""

    def __init__(self) -> None:
        self._head = b""
        self._body = bytearray()  # grows with what comes in, not with what was announced
        self._length = 0

    def feed(self, data: bytes) -> memoryview | None:
        """The frame, without its length, once it is whole. NoFrame: too long a length, or more than it says."""
        if len(self._head) < LENGTH.size:
            missing = LENGTH.size - len(self._head)
            self._head, data = self._head + data[:missing], data[missing:]
            if len(self._head) < LENGTH.size:
                return None
            self._length = LENGTH.unpack(self._head)[0]
            if not 2 <= self._length <= LARGEST:
                raise NoFrame(f"a length of {self._length} bytes")
        if len(self._body) + len(data) > self._length:
            raise NoFrame(f"{len(self._body) + len(data) - self._length} bytes too many")
        self._body += data
        return memoryview(self._body) if len(self._body) == self._length else None
