"""Tool servers of a verifiers environment: processes of this machine that import what this process can import.

The package starts `python -m MODULE` in an empty folder and then polls for a port for minutes, even if the process has
already ended. `HostRuntime` gives the process this one's import path, waits until it listens, and raises the package's
`ToolsetError` with the end of the process's output if it ends first or is not ready in time.

This module needs the package: `covey.agents.verifiers` imports it.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from verifiers.v1 import runtimes
from verifiers.v1.errors import ToolsetError
from verifiers.v1.runtimes.subprocess import SubprocessRuntime

READY_SECONDS = 180.0  # to import and set up a server; the package itself waits this long for a port
POLL_SECONDS = 0.1
WAIT_SECONDS = 10.0  # between two lines about a server that is not ready
TAIL_CHARACTERS = 2000  # of a failed process's output

# A file loaded by path (agent.environment=file.py:make) has a module name that only this process knows. The server
# fetches its task by that name and starts in the file's `if __name__ == "__main__"`, so it needs both.
_RUN_FILE = """
import importlib.util, runpy, sys
name, path = sys.argv[1:3]
spec = importlib.util.spec_from_file_location(name, path)
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
runpy.run_path(path, run_name="__main__")
"""

_shown: dict[str, float] = {}  # by module: when a line about waiting was last printed


def install() -> None:
    """Make the package use `HostRuntime` for every process it starts on this machine."""
    runtimes.SubprocessRuntime = HostRuntime


class HostRuntime(SubprocessRuntime):
    tell: Callable[[str], None] = staticmethod(lambda text: None)  # where to report that a server is not ready yet

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        if "MCP_PORT_FILE" not in env:  # not a tool server
            await super().run_background(argv, env, log)
            return
        module = argv[-1]
        await super().run_background(_command(argv, module), env | {"PYTHONPATH": _import_path()}, log)
        await _ready(self._background[-1], module, Path(env["MCP_PORT_FILE"]), self.workdir / log, self.tell)


def _command(argv: list[str], module: str) -> list[str]:
    if "." in module or importlib.machinery.PathFinder.find_spec(module) is not None:
        return argv
    return [argv[0], "-c", _RUN_FILE, module, str(sys.modules[module].__file__)]


def _import_path() -> str:
    """This process's `sys.path`, in its order, so that the server imports the same modules."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


async def _ready(
    process: asyncio.subprocess.Process, module: str, port_file: Path, log: Path, tell: Callable[[str], None]
) -> None:
    begun = time.monotonic()
    until = begun + READY_SECONDS
    while not await _listens(port_file):
        if process.returncode is not None:
            raise ToolsetError(_ended(module, process.returncode, _tail(log)))
        if time.monotonic() > until:
            raise ToolsetError(
                f"the tool server of {module} is not ready after {READY_SECONDS:g} s (is its setup() too slow?)"
                + _tail(log)
            )
        _show_waiting(module, begun, log, tell)
        await asyncio.sleep(POLL_SECONDS)


def _show_waiting(module: str, begun: float, log: Path, tell: Callable[[str], None]) -> None:
    """A line every WAIT_SECONDS, however many episodes wait for servers of this module."""
    now = time.monotonic()
    if now - max(begun, _shown.get(module, 0.0)) < WAIT_SECONDS:
        return
    _shown[module] = now
    last = _tail(log).splitlines()[-1:]
    tell(
        f"waiting for the tool server of {module}: {now - begun:.0f} s of at most {READY_SECONDS:g}"
        + (f", its last output: {last[0]}" if last else "")
    )


async def _listens(port_file: Path) -> bool:
    """The server reports its port before its setup, and listens after it."""
    try:
        port = port_file.read_text()
    except FileNotFoundError:
        return False
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(port))
    except (ValueError, ConnectionError):  # written only in part; not listening yet
        return False
    writer.close()
    return True


def _ended(module: str, code: int, tail: str) -> str:
    if code == 0:
        tail += f'\n  does {module} end with  if __name__ == "__main__": ITS_TOOLSET.run() ?'
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the tool server of {module} ended with {how} before it was ready{tail}"


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace")[-TAIL_CHARACTERS:].strip()
    return f":\n{text}" if text else ""
