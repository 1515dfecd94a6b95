"""Checks every reward on real data: gold answers must score full marks, and corrupted answers must not.

.venv/bin/python benchmarks/scoring.py [--data ../shared/data] [--only math,gsm8k,code,bfcl,rlla,ifeval] [--sample N]
                                       [--speed] [--write docs/scoring.md]

`--sample N` takes about N rows of each large set. `--speed` instead measures math_verify and math-verify alone, also on
adversarial answers. Exceptions are listed below the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kit.scoring_checks import CHECKS, Row

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--only", default=",".join(CHECKS), help="comma-separated")
    parser.add_argument("--sample", type=int, help="about this number of rows of each large set")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--answers", type=int, default=10_000, help="with --speed")
    parser.add_argument("--repeats", type=int, default=3, help="with --speed")
    parser.add_argument("--write", type=Path, help="a page with marks for the tables")
    given = parser.parse_args()
    if given.speed:
        from kit.scoring_speed import adversarial, pairs, safety, speed

        show("speed", speed(pairs(given.data, given.answers), given.repeats), given.write)
        show("hostile", safety(adversarial()), given.write)
        return
    for name in given.only.split(","):
        rows = []
        for row in CHECKS[name](given.data, given.sample):
            rows.append(row)
            print(f"{row.data:32} {row.what:60} {row.right:6} of {row.tried}", flush=True)
            for text in row.exceptions:
                print(f"    {text}", flush=True)
        show(name, tables(rows), given.write)


def tables(rows: Sequence[Row]) -> str:
    lines = ["| data | check | tried | as it should be | not |", "|---|---|---:|---:|---:|"]
    for row in rows:
        lines.append(f"| {row.data} | {row.what} | {row.tried:,} | {row.right:,} | {row.tried - row.right} |")
    return "\n".join(lines)


def show(name: str, text: str, page: Path | None) -> None:
    if page is None:
        print(f"\n{text}\n")
    else:
        from tiny import write_section

        write_section(name, text, page)


if __name__ == "__main__":
    main()
