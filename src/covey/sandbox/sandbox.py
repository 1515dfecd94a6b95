"""The sandbox of a run: a tier, limits, and a bound on how many programs run at once."""

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

from covey.sandbox.outcome import Limits, Outcome, Verdict
from covey.sandbox.process import Process
from covey.sandbox.tiers import Tier, choose

if TYPE_CHECKING:
    from covey.sandbox.hidden_tests import Tests

CPU_EXIT = 128 + 24  # ended by the kernel: its CPU time was used up


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
    """Where code that a model wrote runs. It can be pickled; each process and event loop counts its own programs."""

    tier: Tier
    limits: Limits = field(default_factory=Limits)
    max_concurrent: int = 16  # programs that run at once; others wait their turn
    folders: tuple[str, ...] = ()  # of the host's, to read and to import packages from
    filters: bool = True  # Landlock and seccomp, where the kernel has them
    _gates: WeakKeyDictionary[Any, asyncio.Semaphore] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, config: Settings) -> Sandbox:
        """InputError, with the fix, where only weaker isolation can be had than is allowed."""
        _allow_many_files()
        limits = Limits(seconds=config.seconds, memory_mb=config.memory_mb)
        return cls(choose(config.tier, config.allow_weak), limits, config.max_concurrent)

    def __reduce__(self) -> Any:
        return Sandbox, (self.tier, self.limits, self.max_concurrent, self.folders, self.filters)

    @property
    def gate(self) -> asyncio.Semaphore:
        """Held while a program runs. A session that waits for its next cell holds nothing: so an episode may keep one
        open and still have its answer checked, however many episodes there are."""
        return self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_concurrent))

    def process(self, request: Mapping[str, Any], **options: Any) -> Process:
        return Process(self.tier, self.limits, request, folders=self.folders, filters=self.filters, **options)

    def within(self, seconds: float | None, output_bytes: int | None = None) -> Sandbox:
        """The same one, sharing its gate, with another deadline or more room for what is printed."""
        changes = {"seconds": seconds, "output_bytes": output_bytes}
        given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        if not given:
            return self
        other = replace(self, limits=replace(self.limits, **given))
        object.__setattr__(other, "_gates", self._gates)
        return other

    async def run(
        self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None, seconds: float | None = None
    ) -> Outcome:
        """One Python program, from start to end. `files`: name → text, in the folder where it works."""
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
    """Every session holds a handful of descriptors, and there may be hundreds of episodes."""
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


# -- A Python interpreter that keeps its state between cells, like a notebook's. It belongs to one episode -------------
# The process starts with the first cell. A cell that runs past its deadline, or over its memory or output, costs the
# session: it is killed, and the next cell starts afresh and says so.
#
# Between two cells the interpreter is stopped, with its threads, and every other process that a cell started is killed:
# a session that waits for its next cell uses no processor (`inside/cells.py`).

RESTARTED = "[the session was started afresh: variables and imports of earlier cells are gone]\n"
LEFT_ONE = "[a process that this cell left running was ended]\n"
LEFT = "[{} processes that this cell left running were ended]\n"


class Session:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._process: Process | None = None
        self._commands = -1  # cells, to the interpreter
        self._turns = -1  # a byte, to its keeper: wake the interpreter
        self._cells = 0
        self._lost = False  # what earlier cells had defined
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
        theirs: list[int] = []
        try:
            reader, self._commands = os.pipe()
            theirs.append(reader)
            reader, self._turns = os.pipe()
            theirs.append(reader)
            request = {"role": "session", "commands": theirs[0], "turns": theirs[1]}
            self._process = self._sandbox.process(request, pass_fds=tuple(theirs))
        finally:
            for file in theirs:
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
            with suppress(BrokenPipeError):  # the end of the process says the rest
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
        """The cell's exit code and how many processes were ended with it; None when the session ended instead."""
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
            except BlockingIOError:  # it reads again when what it does now is done, or it is killed
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
