"""The template process: forked once, early, with every function in it; forks workers, and sees to their end.

It runs nothing of the user's. It reads what workers print and keeps the last of it, so a worker can print without end
and it costs nothing. When the pool's process is gone, however it went, its socket closes; then the template kills all
that is left and ends.

On Linux the template adopts processes whose parents are gone (PR_SET_CHILD_SUBREAPER), so those that left their
worker's process group are killed too.
"""

from __future__ import annotations

import gc
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from covey.workers.link import KILL, NOT_STARTED, ORDER, REPORT, SPAWN
from covey.workers.worker import adopt_orphans, outlast_sigterm, reset_signals, run_worker

TAIL = 1 << 14  # bytes of its output that are kept for a worker's last words
PATIENCE = 5.0  # seconds for the template to end by itself

Functions = Mapping[str, Callable[..., Any]]


# --- in the pool's process -----------------------------------------------------------------------------------------


class Template:
    """The template process as the pool's process sees it."""

    def __init__(self, functions: Functions) -> None:
        _open_standard_streams()
        self.control, theirs = socket.socketpair()
        self.control.setblocking(False)
        self._owner = os.getpid()
        self._pid: int | None = _fork(lambda: self._become(theirs, functions))
        theirs.close()
        self._unread = bytearray()
        _all.add(self)

    def _become(self, control: socket.socket, functions: Functions) -> None:
        self.control.close()
        _Keeper(control, functions).serve()

    def spawn(self, number: int, connection: socket.socket) -> None:
        """A worker at the other end of `connection`, which is given away."""
        with connection:
            self._order(SPAWN, number, [connection.fileno()])

    def kill(self, number: int) -> None:
        with suppress(OSError):  # a template that is gone has taken its workers along
            self._order(KILL, number, [])

    def _order(self, what: bytes, number: int, descriptors: list[int]) -> None:
        while True:
            try:
                socket.send_fds(self.control, [ORDER.pack(what, number)], descriptors)
                return
            except BlockingIOError:
                select.select([], [self.control], [], 1.0)

    def reports(self) -> tuple[list[tuple[int, str, str]], bool]:
        """Workers that have ended since the last time: number, how, last words. And whether the template lives."""
        alive = True
        while alive:
            try:
                data = self.control.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._unread += data
            alive = bool(data)
        found = []
        while len(self._unread) >= REPORT.size:
            number, status, length = REPORT.unpack_from(self._unread)
            if len(self._unread) < REPORT.size + length:
                break
            tail = bytes(self._unread[REPORT.size : REPORT.size + length]).decode(errors="replace")
            del self._unread[: REPORT.size + length]
            found.append((number, _how(status), tail))
        return found, alive

    def forget(self) -> None:
        """In a fork of the pool's process: its copy of the socket must not keep the template alive."""
        self.control.close()

    def end(self) -> None:
        """No process is left afterwards. Does nothing in a fork of the pool's process."""
        if self._pid is None or os.getpid() != self._owner:
            return
        pid, self._pid = self._pid, None
        self.control.close()
        deadline = time.monotonic() + PATIENCE
        with suppress(ChildProcessError):  # somebody else has waited for all children
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    return
                time.sleep(0.002)


_all: weakref.WeakSet[Template] = weakref.WeakSet()


def _forget_all() -> None:
    for template in list(_all):
        template.forget()


os.register_at_fork(after_in_child=_forget_all)


def _how(status: int) -> str:
    if status == NOT_STARTED:
        return "it could not be started"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _open_standard_streams() -> None:
    """A process may have been started without; then our sockets would take their places."""
    while (opened := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(opened)


@contextmanager
def _ctrl_c_waits() -> Iterator[Callable[[], None]]:
    """While a process forks: an exception in what Python and its modules do before and after a fork is swallowed, and
    leaves locks behind that nobody ever opens. What came meanwhile is told afterwards."""
    came: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    signal.signal(signal.SIGINT, lambda number, frame: came.append(frame))
    try:
        yield lambda: before(signal.SIGINT, came[0]) if came else None
    finally:
        signal.signal(signal.SIGINT, before)


def _fork(child: Callable[[], Any]) -> int:
    """The child's id. The child runs the function and ends, whatever happens in it."""
    for stream in (sys.stdout, sys.stderr):  # what is still in their buffers would be written twice
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    with warnings.catch_warnings(), _ctrl_c_waits() as tell:
        warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on, Python warns where other threads run
        pid = os.fork()
    if pid:
        tell()
        return pid
    try:
        child()
        os._exit(0)
    except BaseException:
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(1)


# --- in the template process ---------------------------------------------------------------------------------------


@dataclass
class _Kept:
    """A worker's process."""

    number: int
    pid: int
    output: int  # the end of a pipe that what it prints comes out of
    tail: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        """Some of what it printed, if there is any; only the last is kept."""
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return False
        self.tail = (self.tail + data)[-TAIL:]
        return bool(data)


class _Keeper:
    def __init__(self, control: socket.socket, functions: Functions) -> None:
        self.control = control
        self.functions = functions
        self.kept: dict[int, _Kept] = {}  # by process id
        self.selector = selectors.DefaultSelector()

    def serve(self) -> None:
        gc.freeze()  # nothing of the parent's is collected here: finalizers would remove its temporary folders
        with suppress(OSError):
            os.setsid()  # Ctrl-C at the terminal is the parent's to handle
        reset_signals()
        outlast_sigterm()
        adopt_orphans()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        wake_read, wake_write = os.pipe()
        for end in (wake_read, wake_write):
            os.set_blocking(end, False)
        self.wake = (wake_read, wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.selector.register(self.control, selectors.EVENT_READ, self.obey)
        self.selector.register(wake_read, selectors.EVENT_READ, self.reap)
        try:
            while True:
                for key, _ in self.selector.select():
                    key.data()
        except (EOFError, ConnectionError):
            self.end()

    def obey(self) -> None:
        order, descriptors = b"", []
        while len(order) < ORDER.size:
            part, more, _, _ = socket.recv_fds(self.control, ORDER.size - len(order), 1)
            if not part:
                raise EOFError
            order += part
            descriptors += more
        what, number = ORDER.unpack(order)
        if what == SPAWN:
            self.spawn(number, socket.socket(fileno=descriptors[0]))
        elif what == KILL:
            for worker in self.kept.values():
                if worker.number == number:
                    _kill_group(worker.pid)

    def spawn(self, number: int, connection: socket.socket) -> None:
        read, write = os.pipe()
        try:
            pid = _fork(lambda: self.become_worker(connection, write))
        except OSError as error:
            os.close(read)
            self.report(number, NOT_STARTED, str(error).encode())
        else:
            with suppress(OSError):  # the worker does the same: whoever comes first
                os.setpgid(pid, pid)
            os.set_blocking(read, False)
            self.kept[pid] = worker = _Kept(number, pid, read)
            self.selector.register(read, selectors.EVENT_READ, lambda: self.listen(worker))
        os.close(write)
        connection.close()

    def become_worker(self, connection: socket.socket, output: int) -> NoReturn:
        signal.set_wakeup_fd(-1)
        self.selector.close()
        self.control.close()
        for end in (*self.wake, *(worker.output for worker in self.kept.values())):
            os.close(end)
        run_worker(connection, output, self.functions)

    def listen(self, worker: _Kept) -> None:
        if worker.pid in self.kept and not worker.read():  # it may have been buried a moment ago
            with suppress(KeyError):  # all that could print have ended, or closed their end
                self.selector.unregister(worker.output)

    def reap(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.wake[0], 1 << 12)
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                self.bury(pid, status)
        self.kill_strangers()

    def bury(self, pid: int, status: int) -> None:
        worker = self.kept.pop(pid, None)
        if worker is None:
            return
        _kill_group(pid)  # what it started itself
        for _ in range(16):  # one that is not killed yet may still print
            if not worker.read():
                break
        with suppress(KeyError):
            self.selector.unregister(worker.output)
        os.close(worker.output)
        self.report(worker.number, status, bytes(worker.tail))

    def kill_strangers(self) -> None:
        """Children that are no workers: their parents, in some worker's group, are gone, and they had left it."""
        with suppress(OSError):
            text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
            for pid in {int(word) for word in text.split()} - set(self.kept):
                os.kill(pid, signal.SIGKILL)

    def report(self, number: int, status: int, tail: bytes) -> None:
        self.control.sendall(REPORT.pack(number, status, len(tail)) + tail)

    def end(self) -> None:
        for pid in self.kept:
            _kill_group(pid)
        with suppress(ChildProcessError):
            while True:
                pid = os.waitpid(-1, 0)[0]
                if self.kept.pop(pid, None) is not None:
                    _kill_group(pid)
                self.kill_strangers()


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS: no permission where only zombies are left
        os.killpg(pid, signal.SIGKILL)
