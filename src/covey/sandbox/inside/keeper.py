"""The keeper: process 1 of a sandbox.

It reaps children, adds up the memory of all processes, and exits when the program ends or has to be ended: the kernel
then kills everything else in the process namespace. Without a namespace (`isolated` is false, the tier `limits`) it is
a subreaper: it adopts orphaned descendants and kills them one by one.

In a session the keeper also starts and ends the cells (`Cells`). Only the session's own process knows when a cell has
run to its end, and the code of a cell can do everything that this process can. So no message from it ends a cell: a
cell is over when its process has stopped itself (SIGSTOP). The keeper then kills every other process of the sandbox,
checks that the session is still stopped, and only then reports the end to the host. The process stays stopped, with all
of its threads, until the host asks for the next cell. If something wakes it earlier, such as a timer, the keeper ends
the session.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # not signal, which imports enum: see isolation.py
import os
import select
import time

from covey.sandbox.inside import kernel

TYPE_CHECKING = False  # see isolation.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

INTERVAL = 0.05  # seconds between two checks of the memory
PRIVATE = (b"RssAnon:", b"RssShmem:")  # memory that is not backed by a file
SOCKET = 208 * 1024  # unread bytes that a socket may hold; they count for no process
DEAD = frozenset({b"Z", b"X"})  # states of a thread that will never run again
STOPPED_IN_A_CELL = 128 + 19  # exit code of a session that stopped before its cell had ended
PAUSE = 0.001  # seconds between two checks of processes that are being killed


def keep(program: Callable[[], None], *, memory_mb: int, control: int, isolated: bool, cells: Cells | None) -> None:
    """Fork; return in the child, after calling `program`, and never in the keeper."""
    if not isolated:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        os.setsid()
        program()
        return
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # no process of the sandbox may inspect this one
    for standard in (0, 1, 2):
        os.close(standard)
    if not isolated:  # a namespace is simply killed from outside
        _signal.signal(_signal.SIGTERM, lambda *_: end(137, isolated))
    memory = memory_mb * 2**20
    if cells is not None:
        cells.watch(child, memory, control, isolated)
    ended = select.poll()
    ended.register(os.pidfd_open(child), select.POLLIN)
    while True:
        ended.poll(INTERVAL * 1000)
        reap(child, isolated)
        check_memory(memory, control, isolated)


def reap(child: int, isolated: bool) -> None:
    """Collect the processes that have ended, and exit if the program is one of them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            end(code if code >= 0 else 128 - code, isolated)


def check_memory(memory: int, control: int, isolated: bool) -> None:
    if sum(map(_resident, other_processes(isolated))) + (_sockets() if isolated else 0) > memory:
        os.write(control, b'{"killed": "memory"}\n')
        end(137, isolated)


def end(code: int, isolated: bool) -> NoReturn:
    while not isolated and (living := other_processes(isolated)):
        for pid in living:
            send(pid, kernel.SIGKILL)
        reap(0, isolated)
    os._exit(code)


def send(pid: int, signal: int) -> None:
    try:
        os.kill(pid, signal)
    except ProcessLookupError:
        return  # it has ended


# -- The cells of a session ------------------------------------------------------------------------------------------


class Cells:
    """Made before the fork. The keeper gets `turns` (a byte from the host starts a cell) and reads the cells' exit
    codes; the program writes them to `codes`."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._turns, self._commands = request["turns"], request["commands"]
        self._codes, self.codes = os.pipe()

    def enter(self) -> None:
        """In the program: close the keeper's ends."""
        os.close(self._turns)
        os.close(self._codes)

    def watch(self, child: int, memory: int, control: int, isolated: bool) -> NoReturn:
        """In the keeper. Each child that stops, continues or ends sends SIGCHLD, which writes to the pipe `wake`; the
        session's state is then checked."""
        os.close(self.codes)
        os.close(self._commands)
        wake, filled = os.pipe()
        for file in (wake, filled, self._codes):
            os.set_blocking(file, False)
        _signal.set_wakeup_fd(filled, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        running, number, checked = True, 0, time.monotonic()  # number 0: before the first cell
        while True:
            reap(child, isolated)
            if running and _stopped(child):
                report = self._finish(child, number, isolated)
                running = False
                if number:
                    os.write(control, report)
            elif not running and not _stopped(child):
                end(137, isolated)
            if running and time.monotonic() - checked >= INTERVAL:
                check_memory(memory, control, isolated)
                checked = time.monotonic()
            if self._wait(wake, running) and not running:
                if not os.read(self._turns, 1):  # the host is gone
                    end(137, isolated)
                running, number = True, number + 1
                send(child, _signal.SIGCONT)

    def _wait(self, wake: int, running: bool) -> bool:
        """Wait for a signal, a request, or the next check of the memory. True if the host asks for a cell."""
        events = select.poll()
        events.register(wake, select.POLLIN)
        if not running:
            events.register(self._turns, select.POLLIN)
        readable = {file for file, _ in events.poll(INTERVAL * 1000 if running else None)}
        if wake in readable:
            os.read(wake, 65536)
        return self._turns in readable

    def _finish(self, child: int, number: int, isolated: bool) -> bytes:
        """Kill everything but the stopped session, and return the report for the host."""
        ended = _end_others(child, isolated)
        try:
            code = os.read(self._codes, 65536)[-1]
        except BlockingIOError:
            end(STOPPED_IN_A_CELL, isolated)
        return f'{{"done": {number}, "code": {code}, "ended": {ended}}}\n'.encode()


def _end_others(child: int, isolated: bool) -> int:
    """Kill all processes but the stopped session, and return how many there were.

    They are stopped first (in a namespace all at the same moment), so that none can fork or wake the session meanwhile.
    The death of a process can wake the session (its process group is orphaned), so this repeats until no other process
    is left."""
    ended: set[int] = set()
    while True:
        for pid in [-1] if isolated else other_processes(isolated):
            send(pid, _signal.SIGSTOP)
        others = [pid for pid in other_processes(isolated) if pid != child and not states(pid) <= DEAD]
        if not others and _stopped(child):
            return len(ended)
        for pid in others:
            send(pid, kernel.SIGKILL)
            ended.add(pid)
        time.sleep(PAUSE)
        reap(child, isolated)


def _stopped(pid: int) -> bool:
    """Whether a signal has stopped all threads of the process."""
    found = states(pid)
    return b"T" in found and found <= {b"T", *DEAD}


# -- Processes and their memory, read from /proc ---------------------------------------------------------------------


def states(pid: int) -> set[bytes]:
    """The states of all threads of a process. The first thread does not suffice: it may end before the others."""
    found = set()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            try:
                with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                    found.add(file.read().rpartition(b")")[2].split()[0])
            except OSError:  # this thread has ended
                continue
    except OSError:  # the process has ended
        return set()
    return found


def _resident(pid: int) -> int:
    """Bytes of memory that this process holds. Shared memory counts in full for each process: a process can hide its
    proportional share, but not this."""
    memory = _private(f"/proc/{pid}/status")
    if memory is None:  # the first thread has ended and shows no memory: any other thread does
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            return 0
        memory = max((_private(f"/proc/{pid}/task/{thread}/status") or 0 for thread in threads), default=0)
    return memory


def _private(path: str) -> int | None:
    """None if the process or thread does not exist or has ended."""
    try:
        with open(path, "rb") as file:
            lines = [line for line in file.read().split(b"\n") if line.startswith(PRIVATE)]
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in lines) * 1024 if lines else None


def _sockets() -> int:
    """Bytes that all sockets of this network namespace may hold."""
    try:
        with open("/proc/net/sockstat", "rb") as file:
            return int(file.readline().split()[2]) * SOCKET
    except (OSError, IndexError, ValueError):  # a kernel without this file
        return 0


def other_processes(isolated: bool) -> list[int]:
    """All processes of the sandbox but this one. In a namespace this includes those that ended and are not reaped."""
    me = os.getpid()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if isolated:
        return [pid for pid in pids if pid != me]
    parents = {pid: parent for pid in pids if (parent := _parent(pid)) is not None}
    return [pid for pid in parents if _descends(pid, me, parents)]


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except OSError:
        return None
    return None if state in DEAD and states(pid) <= DEAD else int(parent)


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False
