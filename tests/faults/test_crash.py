"""Runs killed at chosen moments, repeatedly, end like uninterrupted ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.crashes import SIGNALS, CrashHarness, Plan, crashed

SYNC, SFT = crashed.MODES["sync"], crashed.MODES["sft"]

# The places where a run is killed, one after the other, and which of a place's moments: before, (during,) after, before
# the second passing, ...
CHAIN = [
    ("line", 2),  # half of the first episode's line
    ("tensors", 1),  # of the first checkpoint, which is then absent
    ("text", 5),  # half of a file
    ("fsync", 14),  # within the checkpoint
    ("delete-old", 1),  # the checkpoint exists, and nothing was deleted
    ("cut", 3),  # while records after the checkpoint are cut off
    ("update", 2),  # updated, not recorded
    ("record", 2),  # recorded, not in a checkpoint
    ("info", 3),
    ("report", 1),
    ("status", 1),
]


@pytest.mark.slow
def test_a_fork_of_the_warm_parent_equals_a_new_process(harness: CrashHarness) -> None:
    folder = harness.folder()
    environment = os.environ | {"PYTHONPATH": str(Path(crashed.__file__).parents[2] / "src")}
    command = [sys.executable, "-m", "covey.cli.main", *SYNC]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert crashed.outcome(folder) == harness.expected(SYNC)


def kill_in_turn(harness: CrashHarness, words: tuple[str, ...], chain: list[tuple[str, int]]) -> Path:
    folder = harness.folder()
    for place, moment in chain:
        code = harness.nest.run(folder, words, Plan(places=[place], at=moment))
        assert code == -SIGNALS["KILL"], f"{place} {moment}: {(folder / 'log.txt').read_text()[-2000:]}"
    assert harness.nest.run(folder, words) == 0, (folder / "log.txt").read_text()[-2000:]
    return folder


def test_killed_at_one_boundary_after_the_other(harness: CrashHarness) -> None:
    folder = kill_in_turn(harness, SYNC, CHAIN)
    assert crashed.outcome(folder) == harness.expected(SYNC)
    assert crashed.steps_once(folder)


def test_sft_is_killed_too(harness: CrashHarness) -> None:
    chain = [("line", 3), ("checkpoint", 1), ("rename", 1), ("rename", 2), ("update", 2), ("sft-report", 1)]
    folder = kill_in_turn(harness, SFT, chain)
    assert crashed.outcome(folder) == harness.expected(SFT)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lora", "ppo", "dgdo"])
def test_other_learners_are_killed_too(harness: CrashHarness, mode: str) -> None:
    words = crashed.MODES[mode]
    assert crashed.outcome(kill_in_turn(harness, words, CHAIN)) == harness.expected(words)


@pytest.mark.parametrize("mode", ["async-fifo", "async-sample"])
def test_async_sampling_loses_and_repeats_nothing(harness: CrashHarness, mode: str) -> None:
    words, folder = crashed.MODES[mode], harness.folder()
    tickets = str(folder / "tickets.txt")
    for place, moment in (("rollout-ahead", 5), ("rename", 1), ("update", 3), ("record", 2)):
        code = harness.nest.run(folder, words, Plan(places=[place], at=moment, tickets=tickets))
        assert code == -SIGNALS["KILL"], (folder / "log.txt").read_text()[-2000:]
    assert harness.nest.run(folder, words, Plan(tickets=tickets)) == 0, (folder / "log.txt").read_text()[-2000:]
    assert crashed.steps_once(folder)
    assert crashed.account(folder) == (0, 0)
    counts = crashed.uses(folder)
    assert counts["fresh"] == crashed.STEPS * crashed.TASKS and (counts["reused"] > 0) == (mode == "async-sample")


# --- every moment: minutes ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "sft", "async-fifo", "async-sample"])
@pytest.mark.parametrize("name", ["KILL", "TERM", "INT"])
def test_a_signal_at_every_moment(harness: CrashHarness, mode: str, name: str) -> None:
    """At every injection point of a whole run, hundreds of them. Some by default; all with COVEY_EVERY=1."""
    sweep(harness, mode, name, every=5 if name == "KILL" and mode in ("sync", "sft") else 19)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "sft"])
def test_a_kill_at_every_call_to_the_file_system(harness: CrashHarness, mode: str) -> None:
    sweep(harness, mode, "KILL", every=7, files=True)


def sweep(harness: CrashHarness, mode: str, name: str, *, every: int, files: bool = False) -> None:
    words = crashed.MODES[mode]
    moments = harness.injection_points(words, files=files)
    every = int(os.environ.get("COVEY_EVERY", every))
    wrong = []
    for at, moment in list(enumerate(moments, start=1))[every // 2 :: every]:
        folder = harness.folder()
        plan = Plan(at=at, signal=SIGNALS[name], files=files, tickets=str(folder / "tickets.txt"))
        harness.run_until_done(folder, words, plan)
        if mode.startswith("async"):
            right = crashed.account(folder) == (0, 0)
        else:
            right = crashed.outcome(folder) == harness.expected(words)
        if not right or not crashed.steps_once(folder):
            wrong.append(f"{at}: {moment}")
    assert not wrong
