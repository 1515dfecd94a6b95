"""What can go wrong with a call. The call was made once, or never begun; nothing is tried again."""

from __future__ import annotations

import asyncio
import io
import pickle
import socket
import struct
from contextlib import suppress
from typing import Any

from covey.errors import RunFailed, with_location

SHOWN = 10  # lines of what a process printed last


class WorkerError(Exception):
    """A call that brought no value."""


class WorkerTimeout(WorkerError):
    def __init__(self, function: str, seconds: float) -> None:
        super().__init__(function, seconds)  # all arguments: an exception is pickled by them
        self.function = function
        self.seconds = seconds

    def __str__(self) -> str:
        return f"{self.function} took longer than {self.seconds:g} s"


class WorkerDied(WorkerError):
    def __init__(self, function: str, how: str, tail: str = "") -> None:
        """`how`: "SIGSEGV", "exit code 3"; `tail`: the last that it printed."""
        super().__init__(function, how, tail)
        self.function = function
        self.how = how
        self.tail = tail

    def __str__(self) -> str:
        lines = self.tail.splitlines()
        fatal = [place for place, line in enumerate(lines) if line.startswith("Fatal Python error")]
        shown = lines[fatal[-1] :][:SHOWN] if fatal else lines[-SHOWN:]  # there the innermost call comes first
        return f"the process of {self.function} ended: {self.how}" + "".join(f"\n  | {line}" for line in shown)


class RemoteError(WorkerError):
    """The function's own exception, as text: not every exception can be sent. `place`: the line that raised it."""

    def __init__(self, type_name: str, message: str, traceback: str = "", place: str = "") -> None:
        super().__init__(type_name, message, traceback, place)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback
        self.place = place

    def __str__(self) -> str:
        return with_location(f"{self.type_name}: {self.message}".removesuffix(": "), self.place)


class WorkersGone(RunFailed):
    """There are no workers any more, and there will be none: the pool was closed, or its template process ended."""


# -- What travels between the pool, its template process and the workers -----------------------------------------------
# pool → worker      length, then pickled ("call", function, args, kwargs) and the like
# worker → pool      length, then a byte (what became of it), a byte (keep the worker or not), and pickled the value
# pool → template    SPAWN with a worker's number and its end of a socket pair, or KILL with a number
# template → pool    a worker's number, how it ended as waitpid tells it, and the last that it printed
#
# All ends are forks of one process and trust each other. A worker runs functions that may write anywhere, though: what
# is no frame is refused before memory is given to it.

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


# -- One worker, seen from the pool's event loop: one question at a time, with a deadline ------------------------------

GRACE = 1.0  # seconds between the end of a worker's socket and the news of its own


class Link:
    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.started = False
        self.usable = True  # False once an answer was not waited for: then it is killed, not asked again
        self._connection = connection
        connection.setblocking(False)
        self._end: tuple[str, str] | None = None  # how it ended, and the last that it printed
        self._function = ""
        self._unsent = memoryview(b"")
        self._inbox = Inbox()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answer: asyncio.Future[memoryview] | None = None

    async def ask(self, function: str, message: memoryview, seconds: float) -> memoryview:
        """The worker's answer. After WorkerTimeout, WorkerDied or a cancellation the worker is not usable."""
        if self._connection.fileno() < 0:
            raise WorkerDied(function, "it was killed before")
        self._loop = loop = asyncio.get_running_loop()
        self._function, self._unsent, self._inbox = function, message, Inbox()
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
        """The template process tells. An answer that was sent before still counts."""
        self._end, self.usable = (how, tail), False
        if self._answer is not None:
            self._read_all()
            self.fail(WorkerDied(self._function, how, tail))

    def fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def fresh(self) -> bool:
        """Whether it waits for a question: alive, and with nothing to say."""
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
        self._read_all()  # where this process was busy, the answer may be here; not every event loop looks there first
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
        """Whether there may be more to read."""
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
                body = self._inbox.feed(data)
            except NoFrame as what:  # some function wrote to a file that is not its own
                self.fail(WorkerDied(self._function, f"it sent what is no answer ({what})"))
                return False
            if body is not None:
                self._answer.set_result(body)
        return bool(data)

    def _lost(self) -> None:
        """Its socket is closed: the template process will tell how it ended, unless it closed no more than that."""
        assert self._loop is not None and self._answer is not None
        self._detach()
        error = WorkerDied(self._function, "it closed its connection")
        self._loop.call_later(GRACE, self._give_up, self._answer, error)

    @staticmethod
    def _give_up(answer: asyncio.Future[memoryview], error: Exception) -> None:
        if not answer.done():
            answer.set_exception(error)

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and self._connection.fileno() >= 0:
            with suppress(OSError, ValueError):
                self._loop.remove_reader(self._connection)
                self._loop.remove_writer(self._connection)
