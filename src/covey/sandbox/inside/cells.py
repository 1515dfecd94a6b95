"""The cells of a session, as its keeper sees them.

Only the session's process knows when a cell has run to its end, and the code of a cell can do there whatever we can.
So a message from it ends nothing: a cell is over when its process has stopped itself (SIGSTOP). The keeper then kills
every other process of the sandbox, makes sure that this one is still stopped, and only then reports the end to the
host. The process stays stopped, with all of its threads, until the host asks for the next cell. If something wakes it
before that, such as a timer, the keeper ends the session.
"""

from __future__ import annotations

import os
import select
import signal
import time

from covey.sandbox.inside import keeper, kernel

TYPE_CHECKING = False  # see start.py
if TYPE_CHECKING:
    from typing import Any, NoReturn

STOPPED_WITHOUT_AN_END = 128 + 19  # the exit code of a session that stopped in the middle of a cell
PAUSE = 0.001  # seconds between two looks at processes that are being killed


class Cells:
    """Made before the fork. The keeper has `turns` (a byte from the host starts a cell) and reads exit codes; the
    program has `codes`."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._turns, self._commands = request["turns"], request["commands"]
        self._codes, self.codes = os.pipe()

    def enter(self) -> None:
        """In the program: only its own ends stay open."""
        os.close(self._turns)
        os.close(self._codes)

    def watch(self, child: int, memory: int, control: int, alone: bool) -> NoReturn:
        """In the keeper. The state of the process is looked at whenever a child of the keeper's stops, continues or
        ends: each sends SIGCHLD, which fills the pipe `wake`."""
        os.close(self.codes)
        os.close(self._commands)
        wake, filled = os.pipe()
        for file in (wake, filled, self._codes):
            os.set_blocking(file, False)
        signal.set_wakeup_fd(filled, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        running, number, looked = True, 0, time.monotonic()  # number 0: what precedes the first cell
        while True:
            keeper.reap(child, alone)
            if running and _stopped(child):
                report = self._finish(child, number, alone)
                running = False
                if number:
                    os.write(control, report)
            elif not running and not _stopped(child):
                keeper.end(137, alone)
            if running and time.monotonic() - looked >= keeper.INTERVAL:
                keeper.check_memory(memory, control, alone)
                looked = time.monotonic()
            if self._wait(wake, running) and not running:
                if not os.read(self._turns, 1):  # the host is gone
                    keeper.end(137, alone)
                running, number = True, number + 1
                keeper.send(child, signal.SIGCONT)

    def _wait(self, wake: int, running: bool) -> bool:
        """Until something happens or memory is to be looked at. Whether the host asks for a cell."""
        events = select.poll()
        events.register(wake, select.POLLIN)
        if not running:
            events.register(self._turns, select.POLLIN)
        found = {file for file, _ in events.poll(keeper.INTERVAL * 1000 if running else None)}
        if wake in found:
            os.read(wake, 65536)
        return self._turns in found

    def _finish(self, child: int, number: int, alone: bool) -> bytes:
        """Only the stopped session is left afterwards. What the host hears of it."""
        ended = _end_others(child, alone)
        try:
            code = os.read(self._codes, 65536)[-1]
        except BlockingIOError:
            keeper.end(STOPPED_WITHOUT_AN_END, alone)
        return f'{{"done": {number}, "code": {code}, "ended": {ended}}}\n'.encode()


def _end_others(child: int, alone: bool) -> int:
    """Kill all but the session until nothing but the stopped session is found. How many there were.

    They are stopped first, in a namespace all at one moment: nothing can fork away, nor wake the session, meanwhile.
    The death of a process can wake it, though (its process group is orphaned): hence again, until it is quiet."""
    ended: set[int] = set()
    while True:
        if alone:
            keeper.send(-1, signal.SIGSTOP)
        else:
            for pid in keeper.inside(alone):
                keeper.send(pid, signal.SIGSTOP)
        others = [pid for pid in keeper.inside(alone) if pid != child and not keeper.states(pid) <= keeper.DEAD]
        if not others and _stopped(child):
            return len(ended)
        for pid in others:
            keeper.send(pid, kernel.SIGKILL)
            ended.add(pid)
        time.sleep(PAUSE)
        keeper.reap(child, alone)


def _stopped(pid: int) -> bool:
    """Whether all of its threads are, by a signal."""
    found = keeper.states(pid)
    return b"T" in found and found <= {b"T", *keeper.DEAD}
