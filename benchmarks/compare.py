"""Compare new results with the committed records: exit code 1 if a measure of Covey's got worse.

    .venv/bin/python benchmarks/compare.py benchmarks/results/step-cpu.json [--tolerance 0.1]
    .venv/bin/python benchmarks/compare.py NEW.json --baseline OLD.json

The ratio of a measure is its cost now over its cost then: above 1 is worse, for seconds, memory and throughput alike.
The default baseline is the committed record of the same name. Figures of different machines are not comparable, so a
baseline of another device is refused. Measures of one record alone are listed, and do not fail the comparison.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kit.report import RECORDS, Measure, Result, number, read
from tiny import table

TOLERANCE = 0.1
HEADER = ("measure", "unit", "baseline", "new", "cost, new / baseline", "repeats", "")


def cost_ratio(new: Measure, old: Measure) -> float:
    return old.value / new.value if new.more_is_better else new.value / old.value


def compared(new: Result, old: Result, tolerance: float) -> tuple[list[list[str]], bool]:
    """The rows of the table, and whether any measure is worse than the tolerance allows."""
    before = {measure.name: measure for measure in old.measures}
    rows, worse = [], False
    for measure in new.measures:
        spread = f"{number(min(measure.repeats))} to {number(max(measure.repeats))}" if measure.repeats else "–"
        base = before.pop(measure.name, None)
        if base is None:
            rows.append([measure.name, measure.unit, "–", number(measure.value), "–", spread, "new"])
            continue
        cost = cost_ratio(measure, base)
        mark = "worse" if cost > 1 + tolerance else "better" if cost < 1 / (1 + tolerance) else ""
        worse |= mark == "worse"
        rows.append(
            [measure.name, measure.unit, number(base.value), number(measure.value), f"{cost:.2f}", spread, mark]
        )
    rows += [[name, gone.unit, number(gone.value), "–", "–", "–", "not measured"] for name, gone in before.items()]
    return rows, worse


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("new", type=Path, nargs="+")
    parser.add_argument("--baseline", type=Path, help="a record; default benchmarks/records/NAME of the new file")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="0.1: up to 10 %% worse is accepted")
    chosen = parser.parse_args(argv)
    failed = False
    for path in chosen.new:
        given = chosen.baseline or RECORDS / path.name
        if not given.is_file():
            parser.error(f"{given}: no such record\n  fix: --baseline FILE, or publish a first one with publish.py")
        new, old = read(path), read(given)
        if new.device != old.device:
            parser.error(f"{path.name} is of {new.device}, its baseline of {old.device}: they cannot be compared")
        rows, worse = compared(new, old, chosen.tolerance)
        print(f"{new.name}: {new.date} {new.commit}, baseline {old.date} {old.commit}\n\n{table(HEADER, rows)}\n")
        failed |= worse
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
