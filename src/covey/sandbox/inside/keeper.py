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

INTERVAL = 0.05  # seconds between two looks at the memory
OWN = (b"RssAnon:", b"RssShmem:")  # what of its memory is no file's
SOCKET = 208 * 1024  # bytes that may lie unread in a socket, which are no process's


def keep(program: Callable[[], None], *, memory_mb: int, control: int, alone: bool) -> None:
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
    _watch(child, memory_mb * 2**20, control, alone)


def _watch(child: int, memory: int, control: int, alone: bool) -> NoReturn:
    ended = select.poll()
    ended.register(os.pidfd_open(child), select.POLLIN)
    if not alone:  # a namespace is simply killed from outside
        import signal

        signal.signal(signal.SIGTERM, lambda *_: _end(137, alone))
    while True:
        ended.poll(INTERVAL * 1000)
        if (code := _reap(child)) is not None:
            _end(code, alone)
        if sum(map(_resident, _inside(alone))) + (_sockets() if alone else 0) > memory:
            os.write(control, b'{"killed": "memory"}\n')
            _end(137, alone)


def _reap(child: int) -> int | None:
    """The exit code of the program, once it has ended; whatever else has ended is forgotten."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            found = code if code >= 0 else 128 - code


def _end(code: int, alone: bool) -> NoReturn:
    while not alone and (living := _inside(alone)):
        for pid in living:
            try:
                os.kill(pid, kernel.SIGKILL)
            except ProcessLookupError:
                continue
        _reap(0)
    os._exit(code)


def _resident(pid: int) -> int:
    """Bytes of memory that this process holds. What it shares with others counts for each: its proportion can be
    hidden from us, this cannot."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(OWN)) * 1024


def _sockets() -> int:
    """Bytes that all sockets of this network namespace may hold."""
    try:
        with open("/proc/net/sockstat", "rb") as file:
            return int(file.readline().split()[2]) * SOCKET
    except (OSError, IndexError, ValueError):  # a kernel that does not tell
        return 0


def _inside(alone: bool) -> list[int]:
    """All processes of the sandbox but this one."""
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
    return None if state == b"Z" else int(parent)


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False
