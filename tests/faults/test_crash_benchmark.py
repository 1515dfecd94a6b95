"""benchmarks/faults.py: one run, and its table."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from tests.faults.crashes import CrashHarness, crashed


def test_the_table_adds_up() -> None:
    from faults import Result, page

    results = [
        Result("sync", "KILL", 0, 3, 2, True, 0, 0, (-9, 0)),
        Result("sync", "KILL", 2, 1, 1, False, 1, 0, (-9, 0), ("records",)),
        Result("async-fifo", "INT", 1, 4, 3, True, 0, 0, (130, 0)),
    ]
    assert page(results).splitlines()[2:] == [
        "| sync | SIGKILL | 2 | 4 | 3 | 1 | 1 | 0 |",
        "| async-fifo | SIGINT | 1 | 4 | 3 | 1 | 0 | 0 |",
        "| all |  | 3 | 8 | 6 | 2 | 1 | 0 |",
    ]


def test_a_record_with_a_gap_and_a_repeat_is_found(harness: CrashHarness) -> None:
    from faults import Alone, judge

    folder = harness.folder()
    assert harness.nest.run(folder, crashed.MODES["sync"]) == 0
    alone = Alone(1.0, 1.0, harness.expected(crashed.MODES["sync"]))
    assert judge(folder, "sync", "KILL", 0, 1, 1, (0,), alone).sound
    metrics = crashed.finished_run(folder) / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    steps = [at for at, line in enumerate(lines) if '"kind": "step"' in line]
    lines[steps[2]] = lines[steps[3]]
    metrics.write_text("".join(lines))
    found = judge(folder, "sync", "KILL", 0, 1, 1, (0,), alone)
    assert (found.sound, found.lost, found.repeated, found.wrong) == (False, 1, 1, ("records",))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async-fifo", "async-sample"])
def test_random_kills(harness: CrashHarness, mode: str) -> None:
    from faults import left_alone, one_run

    base: Path = harness.folder()
    alone = left_alone(harness.nest, harness.inputs, base, mode)
    for number, name in enumerate(("KILL", "TERM", "INT")):
        given = Namespace(seed=1, kills=4)
        result = one_run(harness.nest, harness.folder(), mode, name, number, given, alone)
        assert result.sound and result.kills > 0, result
