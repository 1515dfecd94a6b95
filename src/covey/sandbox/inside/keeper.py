"""The keeper: process 1 of a sandbox. It reaps, adds up the memory of all processes, and when the program has ended
or must end, ends with it: the kernel then kills whatever else lives in the namespace.

Without a namespace (the tier `limits`) it adopts what its descendants leave behind, and kills them one by one.
"""

from __future__ import annotations

import os
import select

from covey.sandbox.inside import kernel

TYPE_CHECKING = False  # see start.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from covey.sandbox.inside.cells import Cells

INTERVAL = 0.05  # seconds between two looks at the memory
OWN = (b"RssAnon:", b"RssShmem:")  # what of its memory is no file's
SOCKET = 208 * 1024  # bytes that may lie unread in a socket, which are no process's
DEAD = frozenset({b"Z", b"X"})  # states of a thread that will never run again


def keep(program: Callable[[], None], *, memory_mb: int, control: int, alone: bool, cells: Cells | None) -> None:
    """Returns in the child, which is the program; never in the keeper. `alone`: in a process namespace."""
    if not alone:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        os.setsid()
        program()
        return
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # nobody inside may look into it
    for standard in (0, 1, 2):
        os.close(standard)
    if not alone:  # a namespace is simply killed from outside
        import signal

        signal.signal(signal.SIGTERM, lambda *_: end(137, alone))
    if cells is None:
        _watch(child, memory_mb * 2**20, control, alone)
    else:
        cells.watch(child, memory_mb * 2**20, control, alone)


def _watch(child: int, memory: int, control: int, alone: bool) -> NoReturn:
    ended = select.poll()
    ended.register(os.pidfd_open(child), select.POLLIN)
    while True:
        ended.poll(INTERVAL * 1000)
        reap(child, alone)
        check_memory(memory, control, alone)


def reap(child: int, alone: bool) -> None:
    """Forget what has ended, and end with the program once it has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            end(code if code >= 0 else 128 - code, alone)


def check_memory(memory: int, control: int, alone: bool) -> None:
    if sum(map(_resident, inside(alone))) + (_sockets() if alone else 0) > memory:
        os.write(control, b'{"killed": "memory"}\n')
        end(137, alone)


def end(code: int, alone: bool) -> NoReturn:
    while not alone and (living := inside(alone)):
        for pid in living:
            send(pid, kernel.SIGKILL)
        reap(0, alone)
    os._exit(code)


def send(pid: int, signal: int) -> None:
    try:
        os.kill(pid, signal)
    except ProcessLookupError:
        return  # it has ended


def states(pid: int) -> set[bytes]:
    """The states of all threads of a process. The first thread alone says little: it may have ended before others."""
    found = set()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            try:
                with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                    found.add(file.read().rpartition(b")")[2].split()[0])
            except OSError:  # this thread has ended
                continue
    except OSError:  # the process has
        return set()
    return found


def _resident(pid: int) -> int:
    """Bytes of memory that this process holds. What it shares with others counts for each: its proportion can be
    hidden from us, this cannot."""
    found = _own(f"/proc/{pid}/status")
    if found is None:  # the first thread has ended and shows no memory: any other one does
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            return 0
        found = max((_own(f"/proc/{pid}/task/{thread}/status") or 0 for thread in threads), default=0)
    return found


def _own(path: str) -> int | None:
    """None where there is no such process or thread, or where it has ended."""
    try:
        with open(path, "rb") as file:
            lines = [line for line in file.read().split(b"\n") if line.startswith(OWN)]
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in lines) * 1024 if lines else None


def _sockets() -> int:
    """Bytes that all sockets of this network namespace may hold."""
    try:
        with open("/proc/net/sockstat", "rb") as file:
            return int(file.readline().split()[2]) * SOCKET
    except (OSError, IndexError, ValueError):  # a kernel that does not tell
        return 0


def inside(alone: bool) -> list[int]:
    """All processes of the sandbox but this one; where it is alone, also those that ended and were not reaped yet."""
    me = os.getpid()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if alone:
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
