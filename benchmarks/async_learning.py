"""Does asynchronous training learn as well as synchronous training? The demo runs synchronously in one process, and
asynchronously in a local Ray cluster with one learner and two engines, with the same seeds and number of steps.

    .venv/bin/python benchmarks/async_learning.py [--seeds 0 1 2] [--steps 20] [--staleness 1]

A step has 4 tasks × 8 attempts, a quarter of the demo's, and 100 tasks are held out. Runs are
sequential, each in its own process, about two minutes each on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from kit.command import run_covey
from tiny import table

SMALLER = ["data.train_batch_size=4", "rollout.group_size=8", "data.val_size=100"]
LAST = 5  # steps at the end that the reported reward is averaged over


def run(words: list[str], out: Path) -> tuple[list[dict[str, Any]], float]:
    """The records of a run, and the seconds of the command."""
    before = set(out.glob("*/*"))
    command = ["train", "--config-name", "demo", f"logging.output_dir={out}"]
    command += [
        "resume=disable",
        "loop.save_final=false",
        "logging.to=[]",
        "eval.modes=[greedy]",
        "eval.every=0",
        *words,
    ]
    start = time.perf_counter()
    run_covey(command, stdout=sys.stderr)
    (folder,) = set(out.glob("*/*")) - before
    return [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ], time.perf_counter() - start


def row(name: str, seed: int, records: list[dict[str, Any]], seconds: float) -> tuple[str, ...]:
    evaluations = [record["metrics"]["eval/accuracy"] for record in records if record["kind"] == "eval"]
    steps = [record["metrics"] for record in records if record["kind"] == "step"]
    reward = statistics.fmean(step["reward/mean"] for step in steps[-LAST:])
    age = max(step.get("policy/age_max", 0.0) for step in steps)
    accuracy = f"{100 * evaluations[0]:.1f} → {100 * evaluations[-1]:.1f}"
    return name, str(seed), accuracy, f"{reward:.3f}", f"{age:.0f}", f"{seconds:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark-async"))
    chosen = parser.parse_args()
    ahead = ["mode=async", f"mode.max_staleness={chosen.staleness}", "cluster=ray", "cluster.rollout_devices=2"]
    rows = []
    for seed in chosen.seeds:
        for name, words in (("synchronous", []), ("async, 2 engines", ahead)):
            settings = [*SMALLER, f"seed={seed}", f"loop.total_steps={chosen.steps}", *words]
            rows.append(row(name, seed, *run(settings, chosen.out)))
            print(rows[-1], file=sys.stderr, flush=True)
    print(
        table(("mode", "seed", "held-out accuracy, %", f"reward of the last {LAST} steps", "oldest policy", "s"), rows)
    )


if __name__ == "__main__":
    main()
