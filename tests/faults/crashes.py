"""Shared by the fault-injection tests: a warm parent process that forks for each command, and a tiny training."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # the harness is shared with benchmarks/faults.py

from kit import crashed  # noqa: E402
from kit.injure import Plan  # noqa: E402
from kit.nest import Child, Nest  # noqa: E402

__all__ = ["Child", "CrashHarness", "Nest", "Plan", "crashed"]


@dataclass
class CrashHarness:
    """Kills tiny trainings, and knows how uninterrupted ones end."""

    nest: Nest
    inputs: Path
    base: Path
    outcomes: dict[Sequence[str], dict[str, Any]] = field(default_factory=dict)
    folders: int = 0

    def folder(self) -> Path:
        self.folders += 1
        return crashed.copy(self.inputs, self.base / str(self.folders))

    def expected(self, words: Sequence[str]) -> dict[str, Any]:
        """The outcome of the uninterrupted run."""
        if words not in self.outcomes:
            folder = self.folder()
            assert self.nest.run(folder, words) == 0, (folder / "log.txt").read_text()
            self.outcomes[words] = crashed.outcome(folder)
        return self.outcomes[words]

    def injection_points(self, words: Sequence[str], *, files: bool = False) -> list[str]:
        """The injection points that a run passes, in order."""
        folder = self.folder()
        plan = Plan(log=str(folder / "moments.txt"), files=files, tickets=str(folder / "tickets.txt"))
        assert self.nest.run(folder, words, plan) == 0, (folder / "log.txt").read_text()
        return (folder / "moments.txt").read_text().splitlines()

    def run_until_done(self, folder: Path, words: Sequence[str], plan: Plan) -> int:
        """Run with a kill as planned, then repeat the command until the run has ended. Returns the first exit code."""
        first = code = self.nest.run(folder, words, plan)
        rest = Plan(tickets=plan.tickets)
        if any(map(is_finished, crashed.runs(folder))):  # the signal came after the end
            assert code in (0, -plan.signal, 128 + plan.signal)
            return first
        for _ in range(3):
            code = self.nest.run(folder, words, rest)
            if code == 0:
                break
        assert code == 0, (folder / "log.txt").read_text()[-3000:]
        return first


def is_finished(run: Path) -> bool:
    return crashed.status(run) == "finished"


SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "INT": signal.SIGINT}
