"""The demo with three seeds and with GRPO: the table and the picture of docs/demo.md.

    .venv/bin/python benchmarks/demo_seeds.py [--seeds 0 1 2] [--algorithms gvpo grpo] [--out outputs/benchmark]

Runs are sequential, each `covey train --config-name demo seed=S algorithm=A` in its own process. GRPO runs with the
first seed only. About six minutes per run on two cores.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from kit.command import run_covey

from covey.telemetry import compare_curves

COLUMNS = ["greedy/number", "sampled/number", "greedy/number/lenient", "sampled/number/lenient"]


def run(algorithm: str, seed: int, out: Path) -> tuple[Path, float]:
    """The run's folder, and the seconds of the whole command."""
    before = set(out.glob("*/*"))
    command = ["train", "--config-name", "demo", f"algorithm={algorithm}"]
    command += [f"seed={seed}", f"logging.output_dir={out}", "resume=disable", "loop.save_final=false"]
    start = time.perf_counter()
    run_covey(command)
    (folder,) = set(out.glob("*/*")) - before
    return folder, time.perf_counter() - start


def figures(folder: Path) -> dict[str, tuple[float, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record["metrics"] for record in records if record["kind"] == "eval"]
    return {name: (evaluations[0][f"eval/{name}"], evaluations[-1][f"eval/{name}"]) for name in COLUMNS}


def stage_seconds(folder: Path) -> tuple[float, float]:
    """Seconds in training steps, and in evaluations."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = sum(r["metrics"]["timing/step"] for r in records if r["kind"] == "step")
    evaluations = sum(r["metrics"]["timing/evaluate"] for r in records if r["kind"] == "eval")
    return steps, evaluations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", default=["gvpo", "grpo"])
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark"))
    parser.add_argument("--picture", type=Path, default=None, help="write the curves of the first seed here")
    options = parser.parse_args()
    rows: list[tuple[str, int, Path, float]] = []
    for number, algorithm in enumerate(options.algorithms):
        for seed in options.seeds if number == 0 else options.seeds[:1]:
            rows.append((algorithm, seed, *run(algorithm, seed, options.out)))
    print("\n| algorithm | seed | " + " | ".join(COLUMNS) + " | training s | evaluation s | whole command s |")
    print("|---|---|" + "---|" * (len(COLUMNS) + 3))
    for algorithm, seed, folder, seconds in rows:
        found = figures(folder)
        cells = [f"{100 * found[name][0]:.1f} → {100 * found[name][1]:.1f}" for name in COLUMNS]
        steps, evaluations = stage_seconds(folder)
        print(f"| {algorithm} | {seed} | {' | '.join(cells)} | {steps:.0f} | {evaluations:.0f} | {seconds:.0f} |")
    if options.picture is not None:
        firsts = [(algorithm, folder) for algorithm, seed, folder, _ in rows if seed == options.seeds[0]]
        compare_curves([folder for _, folder in firsts], [algorithm for algorithm, _ in firsts], options.picture)


if __name__ == "__main__":
    main()
