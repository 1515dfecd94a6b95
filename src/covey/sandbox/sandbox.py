"""The sandbox of a run: a tier, limits, and a bound on how many programs run at once."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from covey.sandbox.outcome import Limits, Outcome, Verdict
from covey.sandbox.process import Process
from covey.sandbox.tiers import Tier, choose

if TYPE_CHECKING:
    from covey.sandbox.check import Tests
    from covey.sandbox.session import Session

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
        from covey.sandbox.session import Session

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
