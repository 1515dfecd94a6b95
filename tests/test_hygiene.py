"""The rules of the suite (tests/hygiene.py), tested on small suites in separate processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.processes import gone

ROOT = Path(__file__).parent.parent


def suite(folder: Path, tests: str, *words: str, ignored: tuple[int, ...] = (), **variables: str) -> tuple[int, str]:
    """Run a file of tests with this project's options, and return exit code and output."""
    (folder / "conftest.py").write_text("from tests.hygiene import *\nfrom tests.hygiene import _seen_processes\n")
    (folder / "test_it.py").write_text(f"import os, signal, subprocess, sys, threading, time\nimport pytest\n{tests}")

    def ignore() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), *words]
    command += [
        "-p",
        "pytest_timeout",
        "-p",
        "xdist",
        "-p",
        "no:cacheprovider",
    ]  # faster without other plugins
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [*command, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | variables,
        preexec_fn=ignore,
    )
    return found.returncode, found.stdout


@pytest.mark.parametrize("workers", ["0", "1"])
def test_children_have_default_signals_where_the_suite_was_started_without(tmp_path: Path, workers: str) -> None:
    code, text = suite(
        tmp_path,
        """
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_it(number):
    child = subprocess.Popen(["sleep", "30"])
    child.send_signal(number)
    assert child.wait(10) == -number
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
""",
        "-n",
        workers,
        ignored=(signal.SIGINT, signal.SIGQUIT),
    )
    assert code == 0 and "2 passed" in text, text


def test_a_test_that_hangs_fails_with_its_name_and_the_next_one_runs(tmp_path: Path) -> None:
    code, text = suite(
        tmp_path,
        """
def waits(event):
    event.wait()

def test_hangs():
    threading.Thread(target=waits, args=[threading.Event()], daemon=True, name="another").start()
    time.sleep(60)

def test_next():
    pass
""",
        "-o",
        "timeout=1",
    )
    assert code == 1 and "1 failed, 1 passed" in text, text
    assert "FAILED test_it.py::test_hangs" in text and "Timeout" in text
    assert "Stack of another" in text and "in waits" in text  # also of other threads


def test_a_test_that_answers_no_signal_is_named_and_the_others_run(tmp_path: Path) -> None:
    code, text = suite(
        tmp_path,
        """
def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # like a deadlock in C code
    time.sleep(60)

def test_next():
    pass
""",
        *("-o", "timeout=1", "-n", "1"),
        COVEY_TEST_UNRESPONSIVE="1",
    )
    assert code == 1 and "1 failed, 1 passed" in text, text
    assert "crashed while running 'test_it.py::test_hangs'" in text
    assert re.search(r"test_it.py\", line \d+ in test_hangs", text)  # its stack


def test_what_a_failed_test_leaves_running_is_named_and_killed(tmp_path: Path) -> None:
    code, text = suite(
        tmp_path,
        """
@pytest.fixture(scope="module")
def ends_with_the_module():
    child = subprocess.Popen(["sleep", "301"])
    yield
    child.kill()
    child.wait()

def test_leaves(ends_with_the_module):
    child = subprocess.Popen(["sleep", "302"])
    subprocess.run([sys.executable, "-c", "import subprocess; print(subprocess.Popen(['sleep', '303']).pid)"])
    assert False, child.pid

def test_next():
    pass
""",
        "-s",
        COVEY_TEST_GRACE="0.3",
    )
    assert code == 1 and "1 failed, 1 passed, 1 error" in text, text
    left = set(re.findall(r"^  (\d+) \((\S+)\): (.*)$", text, re.MULTILINE))  # $CI makes pytest print it twice
    assert sorted(words for _, _, words in left) == ["sleep 302", "sleep 303"]  # the parent of one has ended
    assert ("test_it.py::test_leaves", "sleep 302") in {(test, words) for _, test, words in left}
    assert gone(*(int(pid) for pid, _, _ in left))
