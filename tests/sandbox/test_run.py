"""Programs and sessions, in every tier."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from covey.config.schema import SandboxConfig
from covey.sandbox import Limits, Outcome, Sandbox, SandboxError
from covey.sandbox.tiers import TIERS
from tests.sandbox.conftest import run, sandbox_of


def test_a_program(sandbox: Sandbox) -> None:
    code = """
import sys
from helper import double
print(double(int(input())), open("data/words.txt").read())
print("aside", file=sys.stderr)
sys.exit(3)
"""
    files = {"helper.py": "def double(x): return 2 * x", "data/words.txt": "à propos"}
    outcome = run(sandbox.run(code, stdin="21\n", files=files))
    assert outcome == Outcome("42 à propos\n", "aside\n", 3)
    assert not outcome.ok


def test_signals_are_the_default_ones_whatever_covey_was_started_with(sandbox: Sandbox) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for a command in the background
    try:
        outcome = run(sandbox.run("import signal; print(signal.getsignal(2) is signal.default_int_handler)"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome == Outcome("True\n", "", 0)


def test_a_traceback_has_no_frames_of_covey(sandbox: Sandbox) -> None:
    outcome = run(sandbox.run("def f():\n    return 1 / 0\n\nf()\n"))
    lines = outcome.stderr.splitlines()
    assert (outcome.exit_code, lines[-1]) == (1, "ZeroDivisionError: division by zero")
    assert [line.strip().split(", ")[1:] for line in lines if "File" in line] == [
        ["line 4", "in <module>"],
        ["line 2", "in f"],
    ]


@pytest.mark.parametrize(
    ("code", "exit_code", "last"),
    [
        ("x = (", 1, "SyntaxError: '(' was never closed"),
        ("raise SystemExit", 0, ""),
        ("exit(4)", 4, ""),
        ("import os; os._exit(5)", 5, ""),
        ("import os; os.abort()", 134, ""),
        ("x = [0] * 10**9", 1, "MemoryError"),
        ("def f(): f()\nf()", 1, "RecursionError: maximum recursion depth exceeded"),
        ("print('\\ud800')", 0, ""),
    ],
)
def test_how_programs_end(isolated: Sandbox, code: str, exit_code: int, last: str) -> None:
    outcome = run(isolated.run(code))
    assert (outcome.exit_code, "".join(outcome.stderr.splitlines()[-1:]), outcome.killed) == (exit_code, last, None)


def test_cpu_time_of_many_threads_counts(isolated: Sandbox) -> None:
    """Two busy child processes and an idle parent: the children are killed at their own limits."""
    code = """
import hashlib, threading
data = b"x" * 10**8
def burn():
    while True: hashlib.sha256(data)
for _ in range(3): threading.Thread(target=burn).start()
"""
    outcome = run(isolated.run(code, seconds=3))
    assert outcome.killed in ("cpu", "deadline") and outcome.timed_out and outcome.exit_code is None


def test_the_memory_of_all_processes_counts(sandbox: Sandbox) -> None:
    code = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        x = bytearray(b"x") * (200 * 2**20)
        break
time.sleep(60)
"""
    outcome = run(sandbox.run(code, seconds=50))
    assert (outcome.killed, outcome.exit_code, outcome.timed_out) == ("memory", None, False)


def test_memory_counts_where_the_first_thread_has_ended(sandbox: Sandbox) -> None:
    """The kernel reports no memory for that thread, only for the others."""
    code = """
import ctypes, os, threading, time
def hold():
    time.sleep(0.5)
    x = bytearray(b"x") * (200 * 2**20)
    time.sleep(60)
for _ in range(4):
    if os.fork() == 0:
        threading.Thread(target=hold).start()
        ctypes.CDLL(None).syscall({"x86_64": 60}.get(os.uname().machine, 93), 0)
time.sleep(60)
"""
    assert run(sandbox.run(code, seconds=5)).killed == "memory"


def test_useful_things_work(isolated: Sandbox) -> None:
    code = """
import asyncio, multiprocessing, subprocess, sys, tempfile, threading
async def hello(): return "async"
print(asyncio.run(hello()))
with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(abs, [-1, -2]))
print(subprocess.run(["echo", "shell"], capture_output=True, text=True).stdout, end="")
with tempfile.TemporaryFile() as file: print(file.write(b"x"))
import decimal, sqlite3, zlib, json, random, datetime, zoneinfo
print(sqlite3.connect(":memory:").execute("select 1").fetchone())
"""
    assert run(isolated.run(code)) == Outcome("async\n[1, 2]\nshell\n1\n(1,)\n", "", 0)


def test_packages_of_a_given_folder(tmp_path: Path) -> None:
    (tmp_path / "extra.py").write_text("name = 'extra'")
    tmp_path.chmod(0o755)
    for tier in ("bubblewrap", "namespaces"):
        sandbox = sandbox_of(tier, folders=(str(tmp_path),))
        assert run(sandbox.run("import extra; print(extra.name)")).stdout == "extra\n"
        assert not run(sandbox.run(f"open({str(tmp_path)!r} + '/new', 'w')")).ok


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "main.py", "."])
def test_files_stay_in_their_folder(isolated: Sandbox, name: str) -> None:
    with pytest.raises(ValueError, match="relative name"):
        run(isolated.run("", files={name: ""}))


def test_concurrent_programs_are_bounded(tmp_path: Path) -> None:
    sandbox = sandbox_of("namespaces", max_concurrent=2)
    code = "import time\ns = time.time(); time.sleep(0.3); print(s, time.time())"

    async def several() -> list[Outcome]:
        return await asyncio.gather(*(sandbox.run(code) for _ in range(5)))

    spans = [tuple(map(float, outcome.stdout.split())) for outcome in run(several())]
    together = [sum(start <= moment < end for start, end in spans) for moment, _ in spans]
    assert len(spans) == 5 and max(together) <= 2


def test_settings_travel_to_other_processes() -> None:
    sandbox = sandbox_of("namespaces", limits=Limits(seconds=3), max_concurrent=2)
    other = pickle.loads(pickle.dumps(sandbox))
    assert other == sandbox
    assert run(other.run("print(1)")).ok


def test_settings_of_a_run(isolated: Sandbox) -> None:
    made = Sandbox.of(SandboxConfig(tier=isolated.tier.name, seconds=2, memory_mb=100, max_concurrent=3))
    assert (made.tier, made.limits, made.max_concurrent) == (isolated.tier, Limits(seconds=2, memory_mb=100), 3)


def test_infrastructure_failures_are_sandbox_errors(isolated: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    from covey.sandbox import tiers

    real = tiers.view
    monkeypatch.setattr(tiers, "view", lambda folders=(): {**real(folders), "binds": ["/does/not/exist"]})
    with pytest.raises(SandboxError, match="could not be started"):
        run(isolated.run("print(1)"))


def test_nothing_stays_open(isolated: Sandbox) -> None:
    async def several() -> None:
        for _ in range(3):
            await isolated.run("print(1)")
            await isolated.run("while True: pass", seconds=0.1)
            async with await isolated.session() as session:
                await session.execute("1")

    run(isolated.run("print(1)"))
    before = set(os.listdir("/proc/self/fd"))
    run(several())
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("call", ["dup", "pidfd_open"])
def test_nothing_stays_open_without_free_descriptors(
    isolated: Sandbox, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Remembered(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    run(isolated.run("print(1)"))
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(subprocess, "Popen", Remembered)
    monkeypatch.setattr(os, call, full)
    with pytest.raises(SandboxError, match="Too many open files"):
        run(isolated.run("import time; time.sleep(60)"))
    assert len(os.listdir("/proc/self/fd")) == before
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_tiers_are_ordered_from_strong_to_weak() -> None:
    assert [(tier.name, tier.weak) for tier in TIERS.values()] == [
        ("bubblewrap", False),
        ("namespaces", False),
        ("limits", True),
    ]
