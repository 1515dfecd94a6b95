"""Runs each side of a comparison in its own process, so that sides share no memory, caches or threads.

A script calls `serve(sides)` first. In a child process it runs one side and exits; in the parent it returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
Side = Callable[[dict[str, Any]], dict[str, Any]]
MARK = "--child"


class ChildFailed(RuntimeError):
    """A child process failed. The message has the end of its output."""


def serve(sides: Mapping[str, Side]) -> None:
    if MARK not in sys.argv[1:2]:
        return
    _, _, side, settings, result = sys.argv
    found = sides[side](json.loads(Path(settings).read_text()))
    Path(result).write_text(json.dumps(found))
    raise SystemExit(0)


class Children:
    """Runs the sides of a script one after another, all within a time limit. They import Covey from this checkout, even
    if their Python has another installation."""

    def __init__(self, script: str, limit: float) -> None:
        self.script = script
        self.end = time.monotonic() + limit

    def run(self, side: str, settings: Mapping[str, Any], python: str | Path = sys.executable) -> dict[str, Any]:
        """Run a side and return its result."""
        paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        with tempfile.TemporaryDirectory() as folder:
            given, result, log = Path(folder, "settings.json"), Path(folder, "result.json"), Path(folder, "log")
            given.write_text(json.dumps(settings))  # a command line is too short for many prompts
            command = [str(python), self.script, MARK, side, str(given), str(result)]
            left = max(0.0, self.end - time.monotonic())
            with log.open("w") as out:
                code = run_limited(command, left, stdout=out, stderr=subprocess.STDOUT, env=environment)
            if code != 0:
                ended = "the time was up" if code is None else f"exit code {code}"
                raise ChildFailed(f"{side}: {ended}\n{_tail(log)}")
            found: dict[str, Any] = json.loads(result.read_text())
            return found


def run_limited(command: Sequence[str], limit: float, **options: Any) -> int | None:
    """The exit code; None after the time limit, when the process and all its children are killed."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        return process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def has_package(python: str | Path, package: str) -> bool:
    """Whether a Python has a package installed. The package is not imported."""
    question = f"import importlib.util as u; raise SystemExit(u.find_spec({package!r}) is None)"
    return subprocess.run([str(python), "-c", question]).returncode == 0


def _tail(log: Path, lines: int = 25) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
