"""The template process: forked once, early, with all functions in it; it forks, reaps and kills the workers.

It runs no user code. It reads the workers' output and keeps only the end, so unlimited output costs no memory. When the
pool's process ends for any reason, its socket closes; the template then kills all workers and exits.

On Linux the template adopts orphaned processes (PR_SET_CHILD_SUBREAPER), so that those that left their worker's process
group are killed too.
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

from covey.workers.handle import KILL, NOT_STARTED, ORDER, REPORT, SPAWN
from covey.workers.worker import adopt_orphans, ignore_sigterm, reset_signals, run_worker

TAIL = 1 << 14  # bytes kept of a worker's output
EXIT_SECONDS = 5.0  # time for the template to exit by itself

Functions = Mapping[str, Callable[..., Any]]


# -- In the pool's process -------------------------------------------------------------------------------------------


class Template:
    """The template process as the pool's process sees it."""

    def __init__(self, functions: Functions) -> None:
        _open_standard_streams()
        self.control, template_end = socket.socketpair()
        self.control.setblocking(False)
        self._owner = os.getpid()
        self._pid: int | None = _fork(lambda: self._become(template_end, functions))
        template_end.close()
        self._unread = bytearray()
        _all.add(self)

    def _become(self, control: socket.socket, functions: Functions) -> None:
        self.control.close()
        _WorkerParent(control, functions).serve()

    def spawn(self, number: int, connection: socket.socket) -> None:
        """Fork a worker that gets `connection`, which is closed here."""
        with connection:
            self._order(SPAWN, number, [connection.fileno()])

    def kill(self, number: int) -> None:
        with suppress(OSError):  # if the template has ended, so have its workers
            self._order(KILL, number, [])

    def _order(self, what: bytes, number: int, descriptors: list[int]) -> None:
        while True:
            try:
                socket.send_fds(self.control, [ORDER.pack(what, number)], descriptors)
                return
            except BlockingIOError:
                select.select([], [self.control], [], 1.0)

    def reports(self) -> tuple[list[tuple[int, str, str]], bool]:
        """Workers that ended since the last call (number, how, end of output), and whether the template is alive."""
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
        """In a fork of the pool's process: close its copy of the socket, so that it does not keep the template
        alive."""
        self.control.close()

    def end(self) -> None:
        """End the template and all workers. Does nothing in a fork of the pool's process."""
        if self._pid is None or os.getpid() != self._owner:
            return
        pid, self._pid = self._pid, None
        self.control.close()
        deadline = time.monotonic() + EXIT_SECONDS
        with suppress(ChildProcessError):  # other code has already waited for all children
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
    """Open descriptors 0 to 2 if the process was started without them: our sockets must not take their numbers."""
    while (opened := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(opened)


@contextmanager
def _defer_ctrl_c() -> Iterator[Callable[[], None]]:
    """During a fork. Python swallows an exception in a fork hook, and its locks then stay locked forever. The yielded
    function delivers a Ctrl-C that came meanwhile."""
    received: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    signal.signal(signal.SIGINT, lambda number, frame: received.append(frame))
    try:
        yield lambda: before(signal.SIGINT, received[0]) if received else None
    finally:
        signal.signal(signal.SIGINT, before)


def _fork(child: Callable[[], Any]) -> int:
    """Fork and return the child's pid. The child runs the function and then exits, whatever happens in it."""
    for stream in (sys.stdout, sys.stderr):  # their buffers would be written twice
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    with warnings.catch_warnings(), _defer_ctrl_c() as deliver_ctrl_c:
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns if other threads run
        pid = os.fork()
    if pid:
        deliver_ctrl_c()
        return pid
    try:
        child()
        os._exit(0)
    except BaseException:
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(1)


# -- In the template process -----------------------------------------------------------------------------------------


@dataclass
class _Child:
    """A worker's process."""

    number: int
    pid: int
    output: int  # the read end of the pipe of its output
    tail: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        """Read some of its output, keeping only the end. False if there was none."""
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return False
        self.tail = (self.tail + data)[-TAIL:]
        return bool(data)


class _WorkerParent:
    def __init__(self, control: socket.socket, functions: Functions) -> None:
        self.control = control
        self.functions = functions
        self.workers: dict[int, _Child] = {}  # by process id
        self.selector = selectors.DefaultSelector()

    def serve(self) -> None:
        gc.freeze()  # the parent's objects must not be collected here: their finalizers remove its temporary folders
        with suppress(OSError):
            os.setsid()  # Ctrl-C at the terminal is handled by the parent
        reset_signals()
        ignore_sigterm()
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
        self.selector.register(self.control, selectors.EVENT_READ, self.read_order)
        self.selector.register(wake_read, selectors.EVENT_READ, self.reap)
        try:
            while True:
                for key, _ in self.selector.select():
                    key.data()
        except (EOFError, ConnectionError):
            self.end()

    def read_order(self) -> None:
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
            for worker in self.workers.values():
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
            with suppress(OSError):  # the worker does the same: the first one succeeds
                os.setpgid(pid, pid)
            os.set_blocking(read, False)
            self.workers[pid] = worker = _Child(number, pid, read)
            self.selector.register(read, selectors.EVENT_READ, lambda: self.read_output(worker))
        os.close(write)
        connection.close()

    def become_worker(self, connection: socket.socket, output: int) -> NoReturn:
        signal.set_wakeup_fd(-1)
        self.selector.close()
        self.control.close()
        for end in (*self.wake, *(worker.output for worker in self.workers.values())):
            os.close(end)
        run_worker(connection, output, self.functions)

    def read_output(self, worker: _Child) -> None:
        if worker.pid in self.workers and not worker.read():  # it may just have been reaped
            with suppress(KeyError):  # all writers have ended or closed their end
                self.selector.unregister(worker.output)

    def reap(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.wake[0], 1 << 12)
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                self.worker_ended(pid, status)
        self.kill_orphans()

    def worker_ended(self, pid: int, status: int) -> None:
        worker = self.workers.pop(pid, None)
        if worker is None:
            return
        _kill_group(pid)  # the processes it started
        for _ in range(16):  # a process that is not dead yet may still print
            if not worker.read():
                break
        with suppress(KeyError):
            self.selector.unregister(worker.output)
        os.close(worker.output)
        self.report(worker.number, status, bytes(worker.tail))

    def kill_orphans(self) -> None:
        """Kill adopted children: processes that left their worker's group and whose parents have ended."""
        with suppress(OSError):
            text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
            for pid in {int(word) for word in text.split()} - set(self.workers):
                os.kill(pid, signal.SIGKILL)

    def report(self, number: int, status: int, tail: bytes) -> None:
        self.control.sendall(REPORT.pack(number, status, len(tail)) + tail)

    def end(self) -> None:
        for pid in self.workers:
            _kill_group(pid)
        with suppress(ChildProcessError):
            while True:
                pid = os.waitpid(-1, 0)[0]
                if self.workers.pop(pid, None) is not None:
                    _kill_group(pid)
                self.kill_orphans()


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS: no permission if only zombies are left
        os.killpg(pid, signal.SIGKILL)
