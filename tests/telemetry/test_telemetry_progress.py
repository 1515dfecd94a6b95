"""How far, how fast, how long."""

from __future__ import annotations

import io

from covey.telemetry.progress import ProgressLine


def test_a_line_every_few_seconds_and_at_the_end() -> None:
    clock, out = [100.0], io.StringIO()
    with ProgressLine(50, 10, unit="answers", file=out, now=lambda: clock[0]) as line:
        for seconds, count in ((2.0, 4), (4.0, 6), (1.0, 10), (10.0, 20)):
            clock[0] += seconds
            line.advance(count, tokens=60, what="m on sums")
    assert out.getvalue().splitlines() == [
        "m on sums  20/50 answers  20 tok/s  eta 18s",  # 10 in 6 seconds: 30 take 18
        "m on sums  50/50 answers  14 tok/s  took 17s",
    ]
