"""Runs jobs side by side, a number of them at a time, until all are done or the time is up.

When the time is up every process gets SIGTERM: `covey train` ends its step and writes a checkpoint. What has not ended
after the grace period is killed and loses the steps since its last checkpoint. The processes also get SIGTERM if this
one is killed. A job that fails is tried again once: after a kill or a lack of memory it continues from its checkpoint.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from studies.jobs import Job, is_busy

TRIES = 2
POLL_S = 0.2
PR_SET_PDEATHSIG = 1


class Process(Protocol):
    pid: int

    def poll(self) -> int | None: ...


Start = Callable[[Job, Sequence[str]], Process]


def start_process(environment: Mapping[str, str]) -> Start:
    libc = ctypes.CDLL(None, use_errno=True)

    def with_parent() -> None:
        """In the new process: SIGTERM if the parent is killed, and the default reaction to it."""
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(job: Job, command: Sequence[str]) -> Process:
        with job.log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=with_parent,
            )

    return start


@dataclass
class Running:
    process: Process
    since: float
    beside: set[str] = field(default_factory=set)  # jobs that shared the machine at any time


@dataclass
class Schedule:
    jobs: Sequence[Job]
    command: Callable[[Job], Sequence[str]]
    start: Start
    share: int
    stop_at: float  # of `now`: no job is started, and those that run are stopped
    kill_at: float
    least: float  # seconds that must be left to start another job
    on_done: Callable[[Job], None]
    say: Callable[[str], None] = print
    now: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep
    running: dict[Job, Running] = field(default_factory=dict)
    failures: dict[Job, int] = field(default_factory=dict)
    stopped: bool = False

    def run(self) -> None:
        """Until all jobs are done or have failed, or the time is up."""
        while True:
            self._reap()
            if self.stopped or self.now() >= self.stop_at:
                self._stop()
                return
            self._start_ready()
            if not self.running:
                return
            self.pause(POLL_S)

    def stop_within(self, seconds: float) -> None:
        """Called by a signal: as if the time were up."""
        self.stopped = True
        self.kill_at = min(self.kill_at, self.now() + seconds)

    @property
    def failed(self) -> list[Job]:
        return [job for job, count in self.failures.items() if count >= TRIES and not job.done]

    def _start_ready(self) -> None:
        if self.stop_at - self.now() < self.least:
            return
        for job in self.jobs:
            if len(self.running) >= self.share:
                return
            if self._is_ready(job):
                self._start(job)

    def _is_ready(self, job: Job) -> bool:
        waits = any(not need.done for need in job.needs)
        return not (job.done or waits or job in self.running or job in self.failed or is_busy(job))

    def _start(self, job: Job) -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        running = Running(self.start(job, self.command(job)), time.time())
        for other, entry in self.running.items():
            entry.beside.add(job.name)
            running.beside.add(other.name)
        self.running[job] = running
        self.say(f"{job.name}: started, process {running.process.pid}")

    def _reap(self) -> None:
        for job, entry in list(self.running.items()):
            if (code := entry.process.poll()) is not None:
                del self.running[job]
                self._ended(job, entry, code)

    def _ended(self, job: Job, entry: Running, code: int) -> None:
        part = {"job": job.kind, "start": entry.since, "end": time.time(), "code": code}
        with (job.folder / "parts.jsonl").open("a") as file:
            file.write(json.dumps({**part, "beside": sorted(entry.beside)}) + "\n")
        seconds = part["end"] - entry.since
        if code == 0:
            job.mark.touch()
            self.say(f"{job.name}: done, {seconds:.0f} s")
            self.on_done(job)
        elif self.stopped:
            self.say(f"{job.name}: stopped after {seconds:.0f} s, exit code {code}")
        else:
            self.failures[job] = self.failures.get(job, 0) + 1
            self.say(f"{job.name}: failed after {seconds:.0f} s, exit code {code}\n{tail(job.log)}")

    def _stop(self) -> None:
        self.stopped = True
        for entry in self.running.values():
            _signal(entry.process, signal.SIGTERM)
        while self.running and self.now() < self.kill_at:
            self._reap()
            self.pause(POLL_S)
        for entry in self.running.values():
            _signal(entry.process, signal.SIGKILL)
        while self.running:
            self._reap()
            self.pause(POLL_S)


def _signal(process: Process, number: int) -> None:
    """SIGTERM to the process, which stops its own children; SIGKILL to all of them."""
    with suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)


def tail(log: Path, lines: int = 15) -> str:
    text = log.read_text(errors="replace") if log.is_file() else ""
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
