"""What a sandbox may use, and what came out of it."""

from __future__ import annotations

from dataclasses import dataclass

from covey.errors import EpisodeError


class SandboxError(EpisodeError):
    """The infrastructure failed: a sandbox could not be started or was lost. Never a mistake of the model's."""

    cause = "sandbox"


@dataclass(frozen=True)
class Limits:
    seconds: float = 10.0  # of wall time, from the moment the code may run; and of CPU time for each process
    memory_mb: int = 512  # of all processes together, and of address space for each
    output_bytes: int = 64 * 1024  # of stdout, and again of stderr; who writes more is ended
    processes: int = 32  # and threads, alive at once
    disk_mb: int = 64  # of the private /tmp


@dataclass(frozen=True)
class Outcome:
    stdout: str
    stderr: str
    exit_code: int | None  # None: it was killed from outside
    timed_out: bool = False
    truncated: bool = False  # the output was longer than what is shown
    killed: str | None = None  # deadline | memory | output | cpu; None: it ended by itself
    restarted: bool = False  # a session: what earlier cells had defined was gone before this one ran

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.killed is None


@dataclass(frozen=True)
class TestResult:
    __test__ = False  # not for pytest to collect

    name: str
    passed: bool
    reason: str = ""  # why not


@dataclass(frozen=True)
class Verdict:
    passed: int
    total: int
    detail: tuple[TestResult, ...]

    @classmethod
    def of(cls, results: list[TestResult]) -> Verdict:
        return cls(sum(result.passed for result in results), len(results), tuple(results))
