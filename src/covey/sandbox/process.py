"""A process in a sandbox, from this side: started, heard, and ended with everything it started."""

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

from covey.sandbox.outcome import Limits, SandboxError
from covey.sandbox.tiers import ENVIRONMENT, PATIENCE, Tier, launch, sealed

CHUNK = 65536
LONGEST_REPORT = 2**20  # bytes of reports that are not yet read
REPORTS = frozenset({"ready", "error", "killed", "done", "test"})  # what reports are about
MOST_REPORTS = 1000  # lines waiting to be read, and lines that are no reports; tests may send one each besides
PROMPT = 1.0  # seconds that the removal of what a program left may hold up others
SWEEP = 5.0  # seconds that the keeper of the weak tier gets to end what it watches


class Tap:
    """Reads a pipe as it fills, up to a bound."""

    def __init__(self, file: int, bound: int, when_full: Callable[[], None]) -> None:
        self._file, self._bound, self._when_full = file, bound, when_full
        self._loop = asyncio.get_running_loop()
        self._parts = bytearray()
        self.full = False
        os.set_blocking(file, False)
        self._loop.add_reader(file, self.drain)

    def drain(self) -> None:
        """Everything that has been written so far."""
        while not self.full:
            try:
                data = os.read(self._file, CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(self._file)
                return
            room = self._bound - len(self._parts)
            self._parts += data[:room]
            if len(data) > room:
                self.full = True
                self._loop.remove_reader(self._file)
                self._when_full()

    def take(self) -> str:
        """What was read, and forget it."""
        text = self._parts.decode("utf-8", errors="replace")
        self._parts.clear()
        return text

    def lines(self) -> list[bytes]:
        """The complete lines, and forget them."""
        done, found, rest = bytes(self._parts).rpartition(b"\n")
        self._parts[:] = rest
        return done.split(b"\n") if found else []

    def stop(self) -> None:
        """Read nothing more, and forget what was read."""
        self.full = True
        self._parts.clear()
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
        filters: bool = True,
    ) -> None:
        """Starts at once. `request` is what `inside/start.py` plays; `pass_fds` are named in it."""
        self.killed: str | None = None
        self._scratch = _scratch() if tier.weak else None
        self._weak = tier.weak
        folder = self._scratch or "/tmp"
        reports, writer = os.pipe()
        given = sealed(stdin.encode("utf-8", errors="surrogatepass")) if stdin is not None else None
        try:
            started = launch(
                tier,
                limits,
                request,
                control=writer,
                folder=folder,
                folders=folders,
                filters=filters,
            )
            try:
                self._popen = subprocess.Popen(
                    started.command,
                    env={**ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
                    cwd="/",
                    stdin=subprocess.DEVNULL if given is None else given,
                    stdout=subprocess.PIPE if capture else subprocess.DEVNULL,
                    stderr=subprocess.PIPE if capture else subprocess.DEVNULL,
                    pass_fds=(started.request, writer, *pass_fds),
                    start_new_session=True,
                    bufsize=0,
                )
            finally:
                started.close()
        except OSError as error:
            os.close(reports)
            if self._scratch is not None:
                discard(self._scratch)
            raise SandboxError(f"a sandbox ({tier.name}) could not be started: {error}") from error
        finally:
            os.close(writer)
            if given is not None:
                os.close(given)
        self._most_reports = MOST_REPORTS + len(request.get("tests", ()))
        try:
            self._listen(reports, limits)
        except OSError as error:  # too many open files
            self.close()
            raise SandboxError(f"a sandbox ({tier.name}) could not be listened to: {error}") from error

    def _listen(self, reports: int, limits: Limits) -> None:
        loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._messages: deque[dict[str, Any]] = deque()
        self._nonsense = 0  # lines that were no reports
        self.ended = False
        self._streams: list[Tap] = []
        self._pidfd = -1
        self._reports = Tap(reports, LONGEST_REPORT, lambda: self.kill("output"))
        loop.add_reader(reports, self._hear)  # in place of the tap's own
        for stream in (self._popen.stdout, self._popen.stderr):
            if stream is not None:
                with stream:
                    file = os.dup(stream.fileno())
                self._streams.append(Tap(file, limits.output_bytes, lambda: self.kill("output")))
        self._pidfd = os.pidfd_open(self._popen.pid)
        loop.add_reader(self._pidfd, self._end)

    def _hear(self) -> None:
        self._reports.drain()
        lines = self._reports.lines()
        # The process of hidden tests writes here too, and the tests are others' code: they must not keep us busy.
        if len(self._messages) + self._nonsense + len(lines) > self._most_reports:
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
                self._nonsense += 1
        self._news.set()

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self.ended = True
        self._news.set()

    async def message(self) -> dict[str, Any] | None:
        """The next report; None when the process has ended and there is no further one."""
        while not self._messages:
            if self.ended:
                self._hear()
                if not self._messages:
                    return None
                break
            self._news.clear()
            await self._news.wait()
        return self._messages.popleft()

    async def ready(self) -> None:
        """The walls stand and the code may run. Whatever goes wrong before that is not the code's doing."""
        try:
            async with asyncio.timeout(PATIENCE):
                first = await self.message()
        except TimeoutError:
            raise SandboxError(f"a sandbox did not start within {PATIENCE:.0f} s") from None
        if first is None or "ready" not in first:
            said = (first or {}).get("error") or "".join(stream.take() for stream in self._streams).strip()
            raise SandboxError(f"a sandbox could not be started: {said or 'its first process ended'}")

    def kill(self, reason: str) -> None:
        """Now, all of it. Process 1 of the namespace is in this group, and the rest dies with it."""
        if self._popen.returncode is not None:
            return
        if self.killed is None and not self.ended:
            self.killed = reason
        if not self._weak:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        else:
            self._popen.terminate()  # the keeper ends what it has adopted, wherever it hides, and then itself

    def exit_code(self) -> int:
        code = self._popen.wait()
        return code if code >= 0 else 128 - code

    def output(self) -> tuple[str, str, bool]:
        """stdout, stderr, and whether there was more."""
        for stream in self._streams:
            stream.drain()
        out, err = self._streams
        return out.take(), err.take(), out.full or err.full

    def close(self) -> None:
        """Nothing is left afterwards."""
        if self._popen.returncode is None:
            self.kill("closed")
            try:
                self._popen.wait(SWEEP)
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
        for tap in (self._reports, *self._streams):
            tap.close()
        if self._scratch is not None:
            discard(self._scratch)


def _scratch() -> str:
    """A folder of the weak tier's own, open to the user that root becomes."""
    folder = tempfile.mkdtemp(prefix="covey-")
    os.chmod(folder, 0o777 if os.geteuid() == 0 else 0o700)
    return folder


def discard(folder: str) -> None:
    """Gone when this returns, or soon after: a program may leave more than can be removed while others wait."""
    removing = threading.Thread(target=remove, args=(folder,), name="covey-discard")
    removing.start()
    removing.join(PROMPT)


def remove(folder: str) -> None:
    """A folder that a program has written to, however deep, and whatever it forbids. What lies in a folder is moved up
    before the folder goes: so nothing here depends on how deep it is. Links are not followed."""
    mark = secrets.token_hex(8)
    with suppress(OSError):
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            numbers = itertools.count()
            while names := os.listdir(top):
                for name in names:
                    _take_down(top, name, (f"{mark}-{number}" for number in numbers))
        finally:
            os.close(top)
        os.rmdir(folder)


def _take_down(top: int, name: str, fresh: Iterator[str]) -> None:
    try:
        os.unlink(name, dir_fd=top)
        return
    except IsADirectoryError:
        os.chmod(name, 0o700, dir_fd=top)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        for found in os.listdir(inner):
            try:
                os.rename(found, next(fresh), src_dir_fd=inner, dst_dir_fd=top)
            except PermissionError:  # a folder that may not be written to may not be moved
                os.chmod(found, 0o700, dir_fd=inner)
                os.rename(found, next(fresh), src_dir_fd=inner, dst_dir_fd=top)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)
