"""How far, how fast, how long."""

from __future__ import annotations

import io

from covey.telemetry.progress import ProgressLine


def test_a_line_every_few_seconds_and_at_the_end() -> None:
    clock, out = [100.0], io.StringIO()
    with ProgressLine(50, 10, unit="answers", file=out, now=lambda: clock[0]) as line:
        clock[0] += 60.0  # a model is loaded
        line.start_clock()
        for seconds, count in ((2.0, 4), (4.0, 6), (1.0, 10), (10.0, 20)):
            clock[0] += seconds
            line.advance(count, tokens=60, what="m on sums")
    assert out.getvalue().splitlines() == [
        "m on sums  14/50 answers  30 tok/s  eta 18s",  # 4 in 2 seconds: 36 take 18
        "m on sums  30/50 answers  26 tok/s  eta 7.0s",  # 20 in 7 seconds: 20 take 7
        "m on sums  50/50 answers  14 tok/s  took 17s",
    ]
