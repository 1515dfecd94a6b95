"""Repeat a study and compare its final accuracies with the committed records: exit code 1 if one got worse.

    python benchmarks/compare_study.py gsm8k --models MODELS --data DATA --export EXPORT   run it again, then compare
    python benchmarks/compare_study.py --archive EXPORT/gsm8k.tar                          compare what was run before

The first form takes all options of study.py and continues like it (exit code 75: not finished yet). Worse means that
the 95 % interval of new − committed, over seeds and tasks, lies below 0; with a single seed, that sign flips over tasks
give p < 0.05. Runs with other settings are refused. Experiments without a committed record are listed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import study
from studies import reading
from studies.catalogue import STUDIES, chosen
from studies.paired import Difference, compare
from studies.plan import Study
from studies.record import FINISHED, RECORDS, Record, read_records, unpack
from tiny import table

from covey.evaluation.scores import SIGNIFICANCE, format_p

HEADER = ("experiment", "seeds", "committed", "new", "new − committed", "p over tasks", "")
# What may differ between two machines without changing what is learned.
FREE = (
    "logging",
    "loop",
    "model.name",
    "data.train_files",
    "data.val_files",
    "rollout.memory",
    "sandbox",
    "agent.tool",
)


def compared(name: Study, new: Sequence[Record], old: Sequence[Record]) -> tuple[list[list[str]], bool]:
    """The rows of the table, and whether any experiment is worse than its interval allows."""
    rows, worse = [], False
    for experiment in dict.fromkeys(record["experiment"] for record in new):
        ours = {record["seed"]: record for record in old if record["experiment"] == experiment}
        theirs = {record["seed"]: record for record in new if record["experiment"] == experiment}
        seeds = sorted(set(ours) & set(theirs))
        if not seeds:
            rows.append([experiment, str(len(theirs)), "–", "–", "–", "–", "new"])
            continue
        for seed in seeds:
            check_settings(ours[seed], theirs[seed])
        sides = [[reading.evaluations(side[seed], name.metric)[-1].values for seed in seeds] for side in (ours, theirs)]
        found = compare("committed", "new", *sides)
        is_worse = got_worse(found)
        worse |= is_worse
        means = [f"{100 * sum(map(sum, side)) / sum(map(len, side)):.1f}" for side in sides]
        low, value, high = (100 * x for x in (found.estimate.low, found.estimate.value, found.estimate.high))
        bounds = f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"
        rows.append([experiment, str(len(seeds)), *means, bounds, format_p(found.p), "worse" if is_worse else ""])
    return rows, worse


def got_worse(found: Difference) -> bool:
    if len(found.by_seed) == 1:
        return found.estimate.value < 0 and found.p < SIGNIFICANCE
    return found.estimate.high < 0


def check_settings(old: Record, new: Record) -> None:
    before, after = flat(old["settings"]), flat(new["settings"])
    keys = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key) and not key.startswith(FREE)]
    if keys:
        shown = ", ".join(f"{key} ({before.get(key)} → {after.get(key)})" for key in keys[:6])
        raise SystemExit(f"{new['experiment']}, seed {new['seed']}: other settings than those of the record: {shown}")


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def finished(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["status"] == FINISHED]


def report(name: Study, new: Sequence[Record], baseline: Path) -> bool:
    old = finished(read_records(baseline / name.name))
    if not old:
        raise SystemExit(f"{baseline / name.name} has no records to compare with")
    rows, worse = compared(name, finished(new), old)
    print(f"\n{name.name}\n\n{table(HEADER, rows)}\n")
    return worse


def main(argv: Sequence[str] | None = None, start: study.Start | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False
    )
    parser.add_argument("--archive", type=Path, nargs="+", default=[])
    parser.add_argument("--baseline", type=Path, default=RECORDS)
    options, rest = parser.parse_known_args(argv)
    if options.archive:
        worse = False
        for archive in options.archive:
            with tempfile.TemporaryDirectory() as work:
                unpack(archive, Path(work))
                records = read_records(Path(work))
            worse |= report(STUDIES[records[0]["study"]], records, options.baseline)
        return int(worse)
    if code := study.main([*rest, "--again"], start=start):
        return code
    given = study.parse([*rest, "--again"])
    return int(
        max(
            report(one, read_records(given.out.resolve() / one.name / "records"), options.baseline)
            for name in given.studies
            for one in chosen(name)
        )
    )


if __name__ == "__main__":
    sys.exit(main())
