"""A sandboxed process as the host sees it: started, read from, and killed with everything it started."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from covey.errors import EpisodeError
from covey.sandbox.tiers import ENVIRONMENT, PATIENCE, Limits, Tier, launch, sealed

CHUNK = 65536
MAX_REPORT_BYTES = 2**20  # of reports that are not read yet
REPORTS = frozenset({"ready", "error", "killed", "done", "test"})  # a report has one of these keys
MAX_REPORTS = 1000  # unread reports plus invalid lines; one more for each hidden test
REMOVAL_WAIT = 1.0  # seconds that a caller waits for the removal of a scratch folder
KEEPER_EXIT = 5.0  # seconds that the keeper of the weak tier gets to kill its descendants


class SandboxError(EpisodeError):
    """The infrastructure failed: a sandbox could not be started or was lost. Never a mistake of the model."""

    cause = "sandbox"


class PipeReader:
    """Reads a pipe as it fills, up to a bound."""

    def __init__(self, file: int, bound: int, when_full: Callable[[], None]) -> None:
        self._file, self._bound, self._when_full = file, bound, when_full
        self._loop = asyncio.get_running_loop()
        self._data = bytearray()
        self.full = False
        os.set_blocking(file, False)
        self._loop.add_reader(file, self.drain)

    def drain(self) -> None:
        """Read everything that has been written so far."""
        while not self.full:
            try:
                data = os.read(self._file, CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(self._file)
                return
            room = self._bound - len(self._data)
            self._data += data[:room]
            if len(data) > room:
                self.full = True
                self._loop.remove_reader(self._file)
                self._when_full()

    def take(self) -> str:
        """Return what was read, and forget it."""
        text = self._data.decode("utf-8", errors="replace")
        self._data.clear()
        return text

    def lines(self) -> list[bytes]:
        """Return the complete lines, and forget them."""
        *lines, rest = bytes(self._data).split(b"\n")
        self._data[:] = rest
        return lines

    def stop(self) -> None:
        """Stop reading, and forget what was read."""
        self.full = True
        self._data.clear()
        self._loop.remove_reader(self._file)

    def close(self) -> None:
        self._loop.remove_reader(self._file)
        os.close(self._file)


class Process:
    def __init__(
        self,
        tier: Tier,
        limits: Limits,
        request: Mapping[str, Any],
        *,
        stdin: str | None = None,
        capture: bool = True,
        pass_fds: Sequence[int] = (),
        folders: Sequence[str] = (),
        links: Sequence[str] = (),
        filters: bool = True,
    ) -> None:
        """Start the process. `request` is passed to `inside/isolation.py` and contains the numbers of `pass_fds`."""
        self.killed: str | None = None
        self._scratch = _scratch() if tier.weak else None
        self._weak = tier.weak
        folder = self._scratch or "/tmp"
        reports, writer = os.pipe()
        input_file = sealed(stdin.encode("utf-8", errors="surrogatepass")) if stdin is not None else None
        try:
            command, request_file = launch(
                tier, limits, request, control=writer, folder=folder, folders=folders, links=links, filters=filters
            )
            try:
                self._popen = subprocess.Popen(
                    command,
                    env={**ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
                    cwd="/",
                    stdin=subprocess.DEVNULL if input_file is None else input_file,
                    stdout=subprocess.PIPE if capture else subprocess.DEVNULL,
                    stderr=subprocess.PIPE if capture else subprocess.DEVNULL,
                    pass_fds=(request_file, writer, *pass_fds),
                    start_new_session=True,
                    bufsize=0,
                )
            finally:
                os.close(request_file)
        except OSError as error:
            os.close(reports)
            if self._scratch is not None:
                discard(self._scratch)
            raise SandboxError(f"a sandbox ({tier.name}) could not be started: {error}") from error
        finally:
            os.close(writer)
            if input_file is not None:
                os.close(input_file)
        self._max_reports = MAX_REPORTS + len(request.get("tests", ()))
        try:
            self._listen(reports, limits)
        except OSError as error:  # too many open files
            self.close()
            raise SandboxError(f"a sandbox ({tier.name}) could not be read from: {error}") from error

    def _listen(self, reports: int, limits: Limits) -> None:
        loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._messages: deque[dict[str, Any]] = deque()
        self._invalid = 0  # lines that were not reports
        self.ended = False
        self._streams: list[PipeReader] = []
        self._pidfd = -1
        self._reports = PipeReader(reports, MAX_REPORT_BYTES, lambda: self.kill("output"))
        loop.add_reader(reports, self._read_reports)  # replaces the reader's own callback
        for stream in (self._popen.stdout, self._popen.stderr):
            if stream is not None:
                with stream:
                    file = os.dup(stream.fileno())
                self._streams.append(PipeReader(file, limits.output_bytes, lambda: self.kill("output")))
        self._pidfd = os.pidfd_open(self._popen.pid)
        loop.add_reader(self._pidfd, self._end)

    def _read_reports(self) -> None:
        self._reports.drain()
        lines = self._reports.lines()
        # The process of hidden tests also writes here, and runs the data set's code: bound the work it can cause.
        if len(self._messages) + self._invalid + len(lines) > self._max_reports:
            self._reports.stop()
            self.kill("output")
            return
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if isinstance(message, dict) and REPORTS & message.keys():
                self._messages.append(message)
            else:
                self._invalid += 1
        self._changed.set()

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self.ended = True
        self._changed.set()

    async def message(self) -> dict[str, Any] | None:
        """The next report; None once the process has ended and all reports were read."""
        while not self._messages:
            if self.ended:
                self._read_reports()
                if not self._messages:
                    return None
                break
            self._changed.clear()
            await self._changed.wait()
        return self._messages.popleft()

    async def ready(self) -> None:
        """Wait until isolation is complete and the code may run. A failure before that is not the code's fault."""
        try:
            async with asyncio.timeout(PATIENCE):
                first = await self.message()
        except TimeoutError:
            raise SandboxError(f"a sandbox did not start within {PATIENCE:.0f} s") from None
        if first is None or "ready" not in first:
            reason = (first or {}).get("error") or "".join(stream.take() for stream in self._streams).strip()
            raise SandboxError(f"a sandbox could not be started: {reason or 'its first process ended'}")

    def kill(self, reason: str) -> None:
        """Kill the sandbox immediately. Process 1 of the namespace is in this group; its end kills the others."""
        if self._popen.returncode is not None:
            return
        if self.killed is None and not self.ended:
            self.killed = reason
        if not self._weak:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        else:
            self._popen.terminate()  # the keeper kills its descendants and then exits

    def exit_code(self) -> int:
        code = self._popen.wait()
        return code if code >= 0 else 128 - code

    def output(self) -> tuple[str, str, bool]:
        """stdout, stderr, and whether either was truncated."""
        for stream in self._streams:
            stream.drain()
        out, err = self._streams
        return out.take(), err.take(), out.full or err.full

    def close(self) -> None:
        """Kill what still runs, and release everything."""
        if self._popen.returncode is None:
            self.kill("closed")
            try:
                self._popen.wait(KEEPER_EXIT)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(self._popen.pid, signal.SIGKILL)
                self._popen.wait()
        for stream in (self._popen.stdout, self._popen.stderr):
            if stream is not None:
                stream.close()
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
        for reader in (self._reports, *self._streams):
            reader.close()
        if self._scratch is not None:
            discard(self._scratch)


def _scratch() -> str:
    """A folder for the weak tier, writable by the user that root becomes."""
    folder = tempfile.mkdtemp(prefix="covey-")
    os.chmod(folder, 0o777 if os.geteuid() == 0 else 0o700)
    return folder


def discard(folder: str) -> None:
    """Remove a folder in a thread, and wait a moment for it: a program may leave more than can be removed quickly."""
    removing = threading.Thread(target=remove, args=(folder,), name="covey-discard")
    removing.start()
    removing.join(REMOVAL_WAIT)


def remove(folder: str) -> None:
    """Remove a folder that a program has written to, of any depth and with any permissions. The contents of a subfolder
    are moved up before it is removed, so the depth does not matter. Links are not followed."""
    mark = secrets.token_hex(8)
    with suppress(OSError):
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            numbers = itertools.count()
            while names := os.listdir(top):
                for name in names:
                    _remove_entry(top, name, (f"{mark}-{number}" for number in numbers))
        finally:
            os.close(top)
        os.rmdir(folder)


def _remove_entry(top: int, name: str, fresh: Iterator[str]) -> None:
    try:
        os.unlink(name, dir_fd=top)
        return
    except IsADirectoryError:
        os.chmod(name, 0o700, dir_fd=top)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        for entry in os.listdir(inner):
            try:
                os.rename(entry, next(fresh), src_dir_fd=inner, dst_dir_fd=top)
            except PermissionError:  # a folder without write permission cannot be moved
                os.chmod(entry, 0o700, dir_fd=inner)
                os.rename(entry, next(fresh), src_dir_fd=inner, dst_dir_fd=top)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)
