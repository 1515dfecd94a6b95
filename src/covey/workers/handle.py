"""One worker as the pool sees it, the messages between the processes, and the errors of a call.

Messages:

    pool → worker      a frame: a byte (clean up after this call or not), then pickled ("call", function, args, kwargs)
    worker → pool      a frame: a byte (returned or raised), a byte (keep the worker or not), then the pickled value
    pool → template    SPAWN with a worker's number and its end of a socket pair, or KILL with a number
    template → pool    a worker's number, its wait status, and the end of its output

All processes are forks of one process and trust each other. But a worker runs functions that may write to any file
descriptor, so a malformed frame is refused before memory is allocated for it. A call is made at most once and never
retried.
"""

from __future__ import annotations

import asyncio
import io
import pickle
import socket
import struct
from contextlib import suppress
from typing import Any

from covey.errors import RunFailed, with_location

SHOWN_LINES = 10  # of a process's last output


class WorkerError(Exception):
    """A call that returned no value."""


class WorkerTimeout(WorkerError):
    def __init__(self, function: str, seconds: float) -> None:
        super().__init__(function, seconds)  # an exception is pickled by its arguments
        self.function = function
        self.seconds = seconds

    def __str__(self) -> str:
        return f"{self.function} took longer than {self.seconds:g} s"


class WorkerDied(WorkerError):
    def __init__(self, function: str, how: str, tail: str = "") -> None:
        """`how`: "SIGSEGV", "exit code 3"; `tail`: the end of its output."""
        super().__init__(function, how, tail)
        self.function = function
        self.how = how
        self.tail = tail

    def __str__(self) -> str:
        lines = self.tail.splitlines()
        fatal = [place for place, line in enumerate(lines) if line.startswith("Fatal Python error")]
        # faulthandler prints the innermost call first
        shown = lines[fatal[-1] :][:SHOWN_LINES] if fatal else lines[-SHOWN_LINES:]
        return f"the process of {self.function} ended: {self.how}" + "".join(f"\n  | {line}" for line in shown)


class RemoteError(WorkerError):
    """The function's own exception as text, because not every exception can be pickled. `place`: the raising line."""

    def __init__(self, type_name: str, message: str, traceback: str = "", place: str = "") -> None:
        super().__init__(type_name, message, traceback, place)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback
        self.place = place

    def __str__(self) -> str:
        return with_location(f"{self.type_name}: {self.message}".removesuffix(": "), self.place)


class WorkersGone(RunFailed):
    """The pool was closed or its template process ended, so there are no workers any more."""


# -- Frames: a length, then the content ------------------------------------------------------------------------------

LENGTH = struct.Struct("!Q")
ORDER = struct.Struct("!cI")
REPORT = struct.Struct("!IiI")
SPAWN, KILL = b"s", b"k"
DONE, RAISED = 0, 1

MAX_FRAME = 1 << 30  # bytes
CHUNK = 1 << 18  # bytes per read, about a socket's buffer
NOT_STARTED = -1  # the status in a report on a worker that could not be forked


def encode_frame(prefix: bytes, value: Any) -> memoryview:
    """A complete frame. Raises whatever pickling the value raises."""
    stream = io.BytesIO()
    stream.write(bytes(LENGTH.size) + prefix)
    pickle.dump(value, stream, protocol=pickle.HIGHEST_PROTOCOL)
    length = stream.tell() - LENGTH.size
    if length > MAX_FRAME:
        raise ValueError(f"{length >> 20} MiB are more than the {MAX_FRAME >> 20} MiB that may be sent at once")
    frame = stream.getbuffer()
    LENGTH.pack_into(frame, 0, length)
    return frame


class InvalidFrame(Exception):
    """The bytes are not a frame."""


class FrameReader:
    """Assembles one frame from the bytes that arrive."""

    def __init__(self) -> None:
        self._head = b""
        self._body = bytearray()  # grows with the bytes received, not with the length announced
        self._length = 0

    def feed(self, data: bytes) -> memoryview | None:
        """The frame's content once it is complete. InvalidFrame: the length is too large, or more bytes follow."""
        if len(self._head) < LENGTH.size:
            missing = LENGTH.size - len(self._head)
            self._head, data = self._head + data[:missing], data[missing:]
            if len(self._head) < LENGTH.size:
                return None
            self._length = LENGTH.unpack(self._head)[0]
            if not 2 <= self._length <= MAX_FRAME:
                raise InvalidFrame(f"a length of {self._length} bytes")
        if len(self._body) + len(data) > self._length:
            raise InvalidFrame(f"{len(self._body) + len(data) - self._length} bytes too many")
        self._body += data
        return memoryview(self._body) if len(self._body) == self._length else None


# -- A worker --------------------------------------------------------------------------------------------------------

GRACE = 1.0  # seconds between the end of a worker's socket and the template's report on its process


class WorkerHandle:
    """One worker, on the pool's event loop: one request at a time, each with a deadline."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.started = False
        self.usable = True  # False once an answer was not awaited: the worker is then killed, not reused
        self._connection = connection
        connection.setblocking(False)
        self._end: tuple[str, str] | None = None  # how it ended, and the end of its output
        self._function = ""
        self._unsent = memoryview(b"")
        self._reader = FrameReader()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answer: asyncio.Future[memoryview] | None = None

    async def request(self, function: str, message: memoryview, seconds: float) -> memoryview:
        """The worker's answer. After WorkerTimeout, WorkerDied or a cancellation the worker is no longer usable."""
        if self._connection.fileno() < 0:
            raise WorkerDied(function, "it was killed before")
        self._loop = loop = asyncio.get_running_loop()
        self._function, self._unsent, self._reader = function, message, FrameReader()
        self._answer = answer = loop.create_future()
        timer = loop.call_later(seconds, self._expire, seconds)
        loop.add_reader(self._connection, self._read)
        try:
            if self._end is not None:
                self.died(*self._end)
            self._write()
            return await answer
        except BaseException:
            self.usable = False
            raise
        finally:
            timer.cancel()
            self._answer = None
            self._detach()

    def died(self, how: str, tail: str) -> None:
        """The template process reported its end. An answer that was sent before still counts."""
        self._end, self.usable = (how, tail), False
        if self._answer is not None:
            self._read_all()
            self.fail(WorkerDied(self._function, how, tail))

    def fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def ready(self) -> bool:
        """Whether it is alive and waits for a request: nothing can be read from its socket."""
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return self.usable
        except OSError:
            pass
        return False

    def close(self) -> None:
        self._detach()
        self._connection.close()

    def _expire(self, seconds: float) -> None:
        self._read_all()  # after a busy time the answer may be there: not every event loop reads before it runs timers
        self.fail(WorkerTimeout(self._function, seconds))

    def _write(self) -> None:
        assert self._loop is not None
        try:
            self._unsent = self._unsent[self._connection.send(self._unsent) if self._unsent else 0 :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = memoryview(b"")
            self._lost()
        if self._unsent:
            self._loop.add_writer(self._connection, self._write)
        else:
            self._loop.remove_writer(self._connection)

    def _read_all(self) -> None:
        while self._read():
            pass

    def _read(self) -> bool:
        """Read once. True if there may be more to read."""
        if self._answer is None or self._answer.done():
            return False
        try:
            data = self._connection.recv(CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._lost()
        else:
            try:
                body = self._reader.feed(data)
            except InvalidFrame as error:  # a function wrote to a descriptor that is not its own
                self.fail(WorkerDied(self._function, f"it sent an invalid answer ({error})"))
                return False
            if body is not None:
                self._answer.set_result(body)
        return bool(data)

    def _lost(self) -> None:
        """Its socket is closed. The template reports how it ended, unless the function closed only the socket."""
        assert self._loop is not None and self._answer is not None
        self._detach()
        error = WorkerDied(self._function, "it closed its connection")
        answer = self._answer
        self._loop.call_later(GRACE, lambda: None if answer.done() else answer.set_exception(error))

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and self._connection.fileno() >= 0:
            with suppress(OSError, ValueError):
                self._loop.remove_reader(self._connection)
                self._loop.remove_writer(self._connection)
