"""The sandbox of a run (tier, limits, concurrent programs), and sessions, which keep their state between cells."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from covey.sandbox.process import Process
from covey.sandbox.tiers import Limits, Tier, choose

if TYPE_CHECKING:
    from covey.sandbox.hidden_tests import Tests, Verdict

CPU_EXIT = 128 + 24  # SIGXCPU: the CPU time was used up

RESTARTED = "[the session was started afresh: variables and imports of earlier cells are gone]\n"
LEFT_ONE = "[a process that this cell left running was ended]\n"
LEFT = "[{} processes that this cell left running were ended]\n"


@dataclass(frozen=True)
class Outcome:
    stdout: str
    stderr: str
    exit_code: int | None  # None: it was killed from outside
    timed_out: bool = False
    truncated: bool = False  # the output was longer than what is returned
    killed: str | None = None  # deadline | memory | output | cpu; None: it ended by itself
    restarted: bool = False  # a session: the state of earlier cells was lost before this one ran

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.killed is None


class Settings(Protocol):
    """The section `sandbox` of a run's settings."""

    @property
    def tier(self) -> str: ...
    @property
    def allow_weak(self) -> bool: ...
    @property
    def seconds(self) -> float: ...
    @property
    def memory_mb(self) -> int: ...
    @property
    def max_concurrent(self) -> int: ...


@dataclass(frozen=True)
class Sandbox:
    """Runs code that a model wrote. It can be pickled; each process and event loop counts its own programs."""

    tier: Tier
    limits: Limits = field(default_factory=Limits)
    max_concurrent: int = 16  # programs that run at once; others wait their turn
    folders: tuple[str, ...] = ()  # of the host, readable inside, to import packages from
    links: tuple[str, ...] = ()  # folders at the root inside that lead into its private /tmp; not with tier limits
    filters: bool = True  # Landlock and seccomp, where the kernel has them
    _gates: WeakKeyDictionary[Any, asyncio.Semaphore] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, config: Settings) -> Sandbox:
        """InputError, with the fix, if only weaker isolation than allowed works here."""
        _allow_many_files()
        limits = Limits(seconds=config.seconds, memory_mb=config.memory_mb)
        return cls(choose(config.tier, config.allow_weak), limits, config.max_concurrent)

    def __reduce__(self) -> Any:
        return Sandbox, (self.tier, self.limits, self.max_concurrent, self.folders, self.links, self.filters)

    @property
    def gate(self) -> asyncio.Semaphore:
        """Held while a program runs. A session that waits for its next cell does not hold it, so an episode can keep a
        session open while its answer is checked."""
        return self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_concurrent))

    def process(self, request: Mapping[str, Any], **options: Any) -> Process:
        options |= {"folders": self.folders, "links": self.links, "filters": self.filters}
        return Process(self.tier, self.limits, request, **options)

    def within(self, seconds: float | None, output_bytes: int | None = None) -> Sandbox:
        """The same sandbox, sharing its gate, with another deadline or output limit."""
        changes = {"seconds": seconds, "output_bytes": output_bytes}
        changed: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        if not changed:
            return self
        other = replace(self, limits=replace(self.limits, **changed))
        object.__setattr__(other, "_gates", self._gates)
        return other

    async def run(
        self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None, seconds: float | None = None
    ) -> Outcome:
        """Run one Python program from start to end. `files`: name → text, in its working folder."""
        files = checked_names(files or {})
        limit = self.limits.seconds if seconds is None else seconds
        request = {"role": "program", "code": code, "files": files, "cpu_seconds": limit}
        async with self.gate:
            process = self.process(request, stdin=stdin)
            try:
                await process.ready()
                timer = asyncio.get_running_loop().call_later(limit, process.kill, "deadline")
                try:
                    while (message := await process.message()) is not None:
                        if "killed" in message:
                            process.killed = str(message["killed"])
                finally:
                    timer.cancel()
                return _outcome(process)
            finally:
                process.close()

    async def session(self) -> Session:
        """A Python interpreter that keeps its state, for one episode. Close it."""
        return Session(self)

    async def check(self, solution: str, tests: Tests, *, seconds: float | None = None) -> Verdict:
        """Hidden tests of a solution: `Asserts`, `Function` or `Cases`."""
        return await tests.judge(self.within(seconds), solution)


def _allow_many_files() -> None:
    """Raise the limit of open files: a session holds several descriptors, and a run has hundreds of episodes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _outcome(process: Process) -> Outcome:
    code = process.exit_code()
    out, err, truncated = process.output()
    killed = process.killed or ("output" if truncated else "cpu" if code == CPU_EXIT else None)
    return Outcome(out, err, None if killed else code, killed in ("deadline", "cpu"), truncated, killed)


def checked_names(files: Mapping[str, str]) -> dict[str, str]:
    for name in files:
        inside = os.path.normpath(name)
        if os.path.isabs(name) or inside.startswith("..") or inside in (".", "main.py") or "\0" in name:
            raise ValueError(f"a file of a sandbox must have a relative name other than main.py, got {name!r}")
    return dict(files)


class Session:
    """A Python interpreter of one episode that keeps its state between cells, like a notebook.

    The process starts with the first cell. A cell over its deadline, memory or output limit costs the session: it is
    killed, and the next cell starts a new one and reports that. Between two cells the interpreter is stopped with all
    of its threads, and every other process that a cell started is killed (`inside/keeper.py`), so a waiting session
    uses no CPU time."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._process: Process | None = None
        self._commands = -1  # pipe to the interpreter: the cells
        self._turns = -1  # pipe to its keeper: each byte wakes the interpreter
        self._cells = 0
        self._lost = False  # the state of earlier cells
        self._busy = asyncio.Lock()

    async def execute(self, code: str, seconds: float | None = None) -> Outcome:
        """Run a cell. The value of a last expression is printed, as in a notebook."""
        async with self._busy, self._sandbox.gate:
            limit = self._sandbox.limits.seconds if seconds is None else seconds
            try:
                if self._process is not None and self._process.ended:  # between two cells
                    self._lost = True
                    self._end()
                if self._process is None:
                    await self._start()
                outcome = await self._cell(code, limit)
            except BaseException:
                self._lost = self._lost or self._cells > 0
                self._end()
                raise
            self._lost = self._process is None
            return outcome

    async def close(self) -> None:
        self._end()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _start(self) -> None:
        passed: list[int] = []
        try:
            reader, self._commands = os.pipe()
            passed.append(reader)
            reader, self._turns = os.pipe()
            passed.append(reader)
            request = {"role": "session", "commands": passed[0], "turns": passed[1]}
            self._process = self._sandbox.process(request, pass_fds=tuple(passed))
        finally:
            for file in passed:
                os.close(file)
        os.set_blocking(self._commands, False)
        self._cells = 0
        await self._process.ready()

    async def _cell(self, code: str, seconds: float) -> Outcome:
        process = self._process
        assert process is not None
        self._cells += 1
        timer = asyncio.get_running_loop().call_later(seconds, process.kill, "deadline")
        try:
            with suppress(BrokenPipeError):  # the process has ended, which is handled below
                os.write(self._turns, b"\n")
                await self._send(json.dumps({"code": code}).encode() + b"\n")
            done = await self._done(process)
        finally:
            timer.cancel()
        out, err, truncated = process.output()
        killed = process.killed or ("output" if truncated else None)
        exit_code = None if killed else done[0] if done is not None else process.exit_code()
        if killed or done is None:
            self._end()
        note = RESTARTED if self._lost else ""
        if done is not None and done[1]:
            err += LEFT_ONE if done[1] == 1 else LEFT.format(done[1])
        return Outcome(out, note + err, exit_code, killed == "deadline", truncated, killed, restarted=self._lost)

    async def _done(self, process: Process) -> tuple[int, int] | None:
        """The cell's exit code and the number of processes ended with it; None if the session ended instead."""
        while (message := await process.message()) is not None:
            if "killed" in message:
                process.killed = str(message["killed"])
            if message.get("done") == self._cells:
                return message["code"], message["ended"]
        return None

    async def _send(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        process = self._process
        assert process is not None
        while data:
            try:
                data = data[os.write(self._commands, data) :]
            except BlockingIOError:  # the interpreter reads on once it has finished its current work, or it is killed
                writable = asyncio.Event()
                loop.add_writer(self._commands, writable.set)
                try:
                    await writable.wait()
                finally:
                    loop.remove_writer(self._commands)

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
        for file in (self._commands, self._turns):
            if file >= 0:
                os.close(file)
        self._commands = self._turns = -1
