"""Input fuzzing for a given time: every target of tests/faults/test_fuzz_*.py with fresh random examples.

    .venv/bin/python benchmarks/fuzz.py --minutes 20                        all targets share the time
    .venv/bin/python benchmarks/fuzz.py --minutes 5 --targets data formats  targets whose names start with these

Prints for each target: examples run, minutes, memory growth, and the finding, if any (the exception and the smallest
input that raises it). A target stops at its first finding. --write FILE.json stores the results. Exit status 1:
findings.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
BATCH = 200  # examples between two checks of the time
SHOWN = 2000  # characters of an input that is shown


def load_targets(prefixes: list[str]) -> list[Any]:
    names = [path.stem for path in sorted((ROOT / "tests/faults").glob("test_fuzz_*.py"))]
    modules = [importlib.import_module(f"tests.faults.{name}") for name in names]
    found = [target for module in modules for target in getattr(module, "TARGETS", ())]
    return [one for one in found if not prefixes or any(one.name.startswith(prefix) for prefix in prefixes)]


def memory() -> float:
    """Peak memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_target(target: Any, seconds: float, seed: int) -> dict[str, Any]:
    from tests.faults.fuzzing import attempt

    began, before, examples, batch = time.monotonic(), memory(), 0, 20
    row: dict[str, Any] = {"target": target.name, "finding": None}
    while row["finding"] is None and time.monotonic() - began < seconds:
        outcome = attempt(target, batch, random=seed + examples)
        examples += outcome.examples
        batch = BATCH
        if outcome.error is not None:
            row["finding"] = finding(outcome)
    return row | {
        "examples": examples,
        "minutes": round((time.monotonic() - began) / 60, 2),
        "grown_mib": round(memory() - before),
    }


def finding(outcome: Any) -> dict[str, str]:
    error = outcome.error
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if "/covey/" in frame.filename]
    where = f"{Path(places[-1].filename).name}:{places[-1].lineno}" if places else "the check itself"
    return {
        "exception": type(error).__name__,
        "message": str(error)[:300],
        "where": where,
        "input": repr(outcome.smallest)[:SHOWN],
    }


def shown(row: dict[str, Any]) -> str:
    found = row["finding"]
    text = "0" if found is None else f"{found['exception']} at {found['where']}: `{found['input'][:200]}`"
    return f"| {row['target']} | {row['examples']:,} | {row['minutes']} | {row['grown_mib']} MiB | {text} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument("--targets", nargs="*", default=[], help="beginnings of their names; without it all")
    parser.add_argument("--seed", type=int, default=None, help="of the examples; without it another each time")
    parser.add_argument("--write", type=Path, help="a JSON file for the rows")
    asked = parser.parse_args()
    targets = load_targets(asked.targets)
    if not targets:
        print(f"no target begins with {' or '.join(asked.targets)}")
        return 2
    seed = random.randrange(2**40) if asked.seed is None else asked.seed
    print(
        f"seed {seed}\n\n| target | examples | minutes | memory grew | findings |\n|---|---:|---:|---:|---|", flush=True
    )
    rows = []
    for target in targets:
        rows.append(run_target(target, asked.minutes * 60 / len(targets), seed))
        print(shown(rows[-1]), flush=True)
        if asked.write is not None:
            asked.write.write_text(json.dumps({"seed": seed, "rows": rows}, indent=1))
    return int(any(row["finding"] is not None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
