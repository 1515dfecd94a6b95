"""SIGKILL at random moments: nothing is lost, and nothing is trained twice (benchmarks/kills.py, a few runs of it)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RUNS = int(os.environ.get("COVEY_KILLS", "1"))  # of each role
PROCESS_GRACE = 90  # the agents of a Ray whose driver was killed end when they miss it

pytest.importorskip("ray")


@pytest.mark.slow
@pytest.mark.parametrize("role", ["engine", "learner", "reward", "driver"])
def test_a_run_survives(role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import kills

    kills.left_alone(tmp_path)
    for number in range(RUNS):
        result = kills.measure(tmp_path, role, number, seed=0)
        assert result.killed == 1 and result.sound, result
