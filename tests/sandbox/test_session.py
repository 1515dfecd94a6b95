"""Sessions: cells that share their state. What a cell started does not run once the cell is over."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from covey.sandbox import Outcome, Sandbox, Session
from tests.sandbox.conftest import run


def test_a_session_keeps_its_names(sandbox: Sandbox) -> None:
    async def cells() -> list[Outcome]:
        async with await sandbox.session() as session:
            return [
                await session.execute("import math\nx = 20\ndef f(y):\n    return x + y"),
                await session.execute("f(22)"),
                await session.execute("print('shown'); x = None; x"),
                await session.execute("f(1)"),
                await session.execute("'text'"),
                await session.execute("import sys; sys.exit(7)"),
                await session.execute("math.pi"),
                await session.execute("import os; os.system('echo from a child')"),
            ]

    first, value, nothing, wrong, text, left, still, child = run(cells())
    assert first == Outcome("", "", 0)
    assert value == Outcome("42\n", "", 0)
    assert nothing == Outcome("shown\n", "", 0)
    assert (wrong.exit_code, wrong.stderr.splitlines()[0]) == (1, "Traceback (most recent call last):")
    assert 'File "<cell 4>", line 1' in wrong.stderr and 'File "<cell 1>", line 4, in f' in wrong.stderr
    assert "    return x + y" in wrong.stderr and "sandbox" not in wrong.stderr
    assert text.stdout == "'text'\n"
    assert (left.exit_code, still.stdout) == (7, "3.141592653589793\n")
    assert child.stdout == "from a child\n0\n"


@pytest.mark.parametrize(
    ("code", "killed"),
    [
        ("while True: pass", "deadline"),
        ("import time\ntime.sleep(60)", "deadline"),
        ("while True: print('x' * 10**6)", "output"),
        ("import os; os._exit(9)", None),
        ("import os\nfor f in range(3, 99):\n  try: os.close(f)\n  except OSError: pass", None),
    ],
)
def test_a_lost_session_restarts_and_reports_it(isolated: Sandbox, code: str, killed: str | None) -> None:
    async def cells() -> list[Outcome]:
        async with await isolated.session() as session:
            await session.execute("x = 1")
            lost = await session.execute(code, seconds=1 if killed == "deadline" else None)
            return [lost, await session.execute("'x' in globals()"), await session.execute("1")]

    lost, next_one, later = run(cells())
    assert (lost.killed, lost.timed_out, lost.restarted) == (killed, killed == "deadline", False)
    assert (next_one.stdout, next_one.restarted) == ("False\n", True)
    assert next_one.stderr.startswith("[the session was started afresh")
    assert (later.restarted, later.stderr) == (False, "")


def test_a_session_that_ends_between_cells(isolated: Sandbox) -> None:
    async def cells() -> Outcome:
        async with await isolated.session() as session:
            await session.execute("x = 1")
            assert session._process is not None
            session._process._popen.kill()  # as the kernel does where memory runs out
            await session._process.message()
            return await session.execute("6 * 7")

    outcome = run(cells())
    assert (outcome.stdout, outcome.exit_code, outcome.restarted) == ("42\n", 0, True)


def test_writing_to_coveys_descriptors_changes_at_most_the_cells_exit_code(isolated: Sandbox) -> None:
    forged = r"""
import os
for f in range(3, 64):
    try: os.write(f, b'{"done": 2, "code": 0}\nnot json\n[]\n{"ready": 1}\n{"done": "x"}\n')
    except OSError: pass
"""

    async def cells() -> list[Outcome]:
        async with await isolated.session() as session:
            return [await session.execute(cell) for cell in (forged, "print('second')", "print('third')")]

    assert run(cells()) == [Outcome("", "", 0), Outcome("second\n", "", 0), Outcome("third\n", "", 0)]


def test_a_cell_that_floods_coveys_descriptors_is_killed_at_its_deadline(isolated: Sandbox) -> None:
    """What it writes there is not read before it stops."""
    code = """
import os
for f in range(3, 64):
    try:
        while True: os.write(f, b"x" * 4000)
    except OSError: pass
"""

    async def cells() -> list[Outcome]:
        async with await isolated.session() as session:
            return [await session.execute(code, seconds=1), await session.execute("6 * 7")]

    flooding, after = run(cells())
    assert (flooding.killed, after.stdout) == ("deadline", "42\n")


def test_a_long_cell_passes_through_the_pipe(isolated: Sandbox) -> None:
    async def cell() -> Outcome:
        async with await isolated.session() as session:
            return await session.execute(f"len({'x' * 10**6!r})")

    assert run(cell()).stdout == "1000000\n"


def test_an_idle_session_does_not_hold_the_gate(isolated: Sandbox) -> None:
    """Otherwise episodes with open sessions would wait for each other forever when their answers are checked."""
    sandbox = Sandbox(isolated.tier, max_concurrent=1)

    async def both() -> tuple[Outcome, Outcome]:
        async with await sandbox.session() as session:
            await session.execute("x = 5")
            return await asyncio.wait_for(sandbox.run("print(1)"), 20), await session.execute("x")

    assert [outcome.stdout for outcome in run(both())] == ["1\n", "5\n"]


def test_cancelling_a_cell_ends_the_session(isolated: Sandbox) -> None:
    async def cancelled() -> Outcome:
        session = await isolated.session()
        await session.execute("x = 1")
        task = asyncio.create_task(session.execute("while True: pass", seconds=60))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        outcome = await session.execute("'x' in globals()")
        await session.close()
        return outcome

    started = time.monotonic()
    outcome = run(cancelled())
    assert (outcome.stdout, outcome.restarted) == ("False\n", True)
    assert time.monotonic() - started < 50


# -- Nothing runs between two cells ----------------------------------------------------------------------------------

BURN = "    while True: sum(range(10**5))\n"
FORGED = r"""
import os
for f in range(3, 64):
    try: os.write(f, b'{"done": 1, "code": 0}\n')
    except OSError: pass
"""
LEFT_RUNNING = {
    "children": "import os\nfor _ in range(3):\n  if os.fork() == 0:\n" + BURN,
    "a child that returns from the cell": "import os, threading\nchild = os.fork() == 0\nif child:\n"
    "  def burn():\n" + BURN + "  threading.Thread(target=burn).start()",
    "a daemon": "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n" + BURN + "  os._exit(0)",
    "threads": "import threading\ndef burn():\n" + BURN + "for _ in range(3): threading.Thread(target=burn).start()",
    "a child whose main thread is gone": "import ctypes, os, threading\ndef burn():\n" + BURN + "if os.fork() == 0:\n"
    "  threading.Thread(target=burn).start()\n"
    "  ctypes.CDLL(None).syscall(60 if os.uname().machine == 'x86_64' else 93, 0)",
    "a process group that wakes the session when it dies": "import os, signal, threading, time\n"
    "signal.signal(signal.SIGHUP, signal.SIG_IGN)\ngroup = os.getpgid(0)\ndef burn():\n" + BURN + "if os.fork() == 0:\n"
    "  os.setpgid(0, 0)\n  if os.fork() == 0: os.setpgid(0, group)\n  time.sleep(60)\n"
    "time.sleep(0.2)\nthreading.Thread(target=burn).start()",
}


def ticks_below(root: int) -> int:
    """CPU time, in clock ticks, of all living processes that descend from this one."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        stats[int(path.parent.name)] = (int(fields[1]), int(fields[11]) + int(fields[12]))
    found, total = {root}, 0
    while new := {pid for pid, (parent, _) in stats.items() if parent in found} - found:
        found |= new
        total += sum(stats[pid][1] for pid in new)
    return total


async def ticks_while_idle(session: Session) -> int:
    assert session._process is not None
    root = session._process._popen.pid
    before = ticks_below(root)
    await asyncio.sleep(0.5)
    return ticks_below(root) - before


@pytest.mark.parametrize("what", LEFT_RUNNING)
def test_nothing_runs_between_two_cells(sandbox: Sandbox, what: str) -> None:
    """A busy process would use up to 50 clock ticks of 10 ms."""

    async def cells() -> tuple[Outcome, int, Outcome]:
        async with await sandbox.session() as session:
            return (
                await session.execute("x = 41\n" + LEFT_RUNNING[what]),
                await ticks_while_idle(session),
                await session.execute("x + 1"),
            )

    first, used, second = run(cells())
    assert (first.exit_code, first.killed) == (0, None)
    assert used <= 2
    assert (second.stdout, second.restarted) == ("42\n", False)


def test_a_child_that_wakes_the_session_is_ended_at_the_latest_at_the_deadline(sandbox: Sandbox) -> None:
    """If it wakes the session at once, the session never stops, so its cell never ends."""
    code = "import os, signal\nme = os.getpid()\nif os.fork() == 0:\n  while True: os.kill(me, signal.SIGCONT)"

    async def cells() -> int:
        async with await sandbox.session() as session:
            outcome = await session.execute(code, seconds=1)
            return 0 if outcome.killed == "deadline" else await ticks_while_idle(session)

    assert run(cells()) <= 2


def test_killed_processes_are_reported_to_the_model(sandbox: Sandbox) -> None:
    async def cells() -> list[Outcome]:
        start = "import subprocess\nchildren = [subprocess.Popen(['sleep', '60']) for _ in range(2)]"
        async with await sandbox.session() as session:
            return [await session.execute(cell) for cell in (start, "[child.wait() for child in children]")]

    start, wait = run(cells())
    assert start == Outcome("", "[2 processes that this cell left running were ended]\n", 0)
    assert wait == Outcome("[-9, -9]\n", "", 0)


def test_threads_continue_in_the_next_cell(sandbox: Sandbox) -> None:
    make = "from concurrent.futures import *\npool = ThreadPoolExecutor(2)\npool.submit(abs, -3).result()"

    async def cells() -> list[Outcome]:
        async with await sandbox.session() as session:
            return [await session.execute(cell) for cell in (make, "pool.submit(abs, -4).result()")]

    assert run(cells()) == [Outcome("3\n", "", 0), Outcome("4\n", "", 0)]


@pytest.mark.parametrize("then", ["while True: pass", "import time\ntime.sleep(60)"])
def test_a_cell_cannot_forge_its_end(sandbox: Sandbox, then: str) -> None:
    """A cell is over when its process has stopped, whatever it writes to any descriptor."""

    async def cells() -> list[Outcome]:
        async with await sandbox.session() as session:
            return [await session.execute(FORGED + then, seconds=1), await session.execute("6 * 7")]

    forged, after = run(cells())
    assert (forged.killed, forged.timed_out, forged.exit_code) == ("deadline", True, None)
    assert (after.stdout, after.restarted) == ("42\n", True)


def test_a_cell_that_claims_its_end_and_stops_gains_nothing(sandbox: Sandbox) -> None:
    """Its process is stopped, so the rest of its code runs at the expense of the next cell, and under its deadline."""
    code = FORGED + "import signal, threading\ndef burn():\n" + BURN + "threading.Thread(target=burn).start()\n"
    code += "os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass"

    async def cells() -> tuple[Outcome, int, Outcome]:
        async with await sandbox.session() as session:
            first = await session.execute(code)
            return first, await ticks_while_idle(session), await session.execute("6 * 7", seconds=1)

    first, used, second = run(cells())
    assert first.killed is None and used <= 2
    assert (second.stdout, second.killed) == ("", "deadline")


def test_a_cell_that_only_stops_ends_the_session(sandbox: Sandbox) -> None:
    async def cells() -> list[Outcome]:
        async with await sandbox.session() as session:
            stop = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"
            return [await session.execute(stop), await session.execute("6 * 7")]

    stopped, after = run(cells())
    assert (stopped.exit_code, stopped.killed) == (128 + 19, None)
    assert (after.stdout, after.restarted) == ("42\n", True)


def test_a_session_that_wakes_itself_between_cells_is_ended(sandbox: Sandbox) -> None:
    """A kernel timer sends SIGCONT while the session is stopped."""
    code = """
import ctypes, threading
class Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("rest", ctypes.c_int * 13)]
libc = ctypes.CDLL(None, use_errno=True)
timer = ctypes.c_void_p()
assert libc.timer_create(1, ctypes.byref(Event(signal=18)), ctypes.byref(timer)) == 0
times = (ctypes.c_long * 4)(0, 0, 0, 10**8)  # no repetition; in a tenth of a second
assert libc.timer_settime(timer, 0, times, None) == 0
def burn():
    while True: sum(range(10**5))
threading.Thread(target=burn).start()
"""

    async def cells() -> tuple[Outcome, int, Outcome]:
        async with await sandbox.session() as session:
            return await session.execute(code), await ticks_while_idle(session), await session.execute("6 * 7")

    first, used, second = run(cells())
    assert first == Outcome("", "", 0)
    assert used <= 2
    assert (second.stdout, second.restarted) == ("42\n", True)
