"""One worker, seen from the pool's event loop: one question at a time, with a deadline."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from covey.workers.errors import WorkerDied, WorkerTimeout
from covey.workers.frames import CHUNK, Inbox, NoFrame

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
