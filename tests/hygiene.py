"""Rules of the whole suite: default signals, a time limit for every test, and no process that outlives its module.

`conftest.py` imports these hooks and fixtures.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

PROC = Path("/proc")
MARK = "COVEY_TEST_PROCESS"  # an environment variable that marks processes, also those whose parent has ended
SLOW_SECONDS = 3600  # for tests marked slow; the others have `timeout` of pyproject.toml
UNRESPONSIVE_SECONDS = float(os.environ.get("COVEY_TEST_UNRESPONSIVE", 60))  # after a test's time limit
# Seconds that a process may take to end after its module; a module may set its own PROCESS_GRACE.
GRACE = float(os.environ.get("COVEY_TEST_GRACE", 10))
SHOWN = 300  # characters of a command line
LIVE_LONGER = (  # helpers that Python, torch and the session's own fixtures keep until the test process ends
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch/_inductor/compile_worker",
    "covey/rewards/math/verify_process.py",
    "kit.nest",
)


def default_signals() -> None:
    """A script that starts a command in the background makes it ignore Ctrl-C, and all children inherit that. Tests
    send SIGINT to what they start, so they need the default back."""
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)


default_signals()
os.environ[MARK] = str(os.getpid())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, Any, Any]:
    """pytest-timeout fails a test by a signal, which does not reach a main thread that hangs in C code or a fixture
    that hangs afterwards. Then the stacks are printed and the process exits; xdist reports the test's name and starts
    another process for the rest."""
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(settings.timeout + UNRESPONSIVE_SECONDS, file=stderr, exit=True)
    return (yield)


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> Generator[None, Any, Any]:
    faulthandler.cancel_dump_traceback_later()
    return (yield)


# -- Processes ---------------------------------------------------------------------------------------------------------

_first_seen: dict[int, str] = {}  # the test after which a process was first seen


@pytest.fixture(autouse=True)
def _seen_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for pid in descendants(os.getpid()):
        _first_seen.setdefault(pid, request.node.nodeid)


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Autouse fixtures are set up first, so this one is torn down after all others of the module."""
    before = set(running())
    yield
    end = time.monotonic() + getattr(request.module, "PROCESS_GRACE", GRACE)
    while (left := {pid: words for pid, words in running().items() if pid not in before}) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if left:
        lines = [f"  {pid} ({_first_seen.get(pid, request.node.nodeid)}): {words}" for pid, words in left.items()]
        pytest.fail("\n".join(["processes were left running and are killed now:", *lines]), pytrace=False)


def running() -> dict[int, str]:
    """Running processes that this one has started, also those whose parent has ended: id and command line."""
    mark = f"{MARK}={os.getpid()}".encode()
    marked = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit() and mark in _environment(entry)]
    found = {}
    for pid in {*descendants(os.getpid()), *marked} - {os.getpid()}:
        words = _read(PROC / str(pid) / "cmdline").replace("\0", " ").strip()  # a process that has ended has none
        if words and not any(name in words for name in LIVE_LONGER):
            found[pid] = words if len(words) <= SHOWN else words[:SHOWN] + " …"
    return found


def descendants(pid: int) -> Iterator[int]:
    try:
        tasks = list((PROC / str(pid) / "task").iterdir())
    except OSError:
        return
    for child in [int(word) for task in tasks for word in _read(task / "children").split()]:
        yield child
        yield from descendants(child)


def _environment(entry: Path) -> list[bytes]:
    try:
        return (entry / "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or of another user
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
