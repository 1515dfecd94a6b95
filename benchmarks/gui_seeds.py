"""A small model learns to click on web pages: demonstrations, then reinforcement learning, with three seeds.

    python benchmarks/gui_seeds.py [--seeds 0 1 2]               the table on stdout
    python benchmarks/gui_seeds.py --write                       also into docs/gui.md

Runs `examples/gui.py` and `covey sft` once, then `covey train agent=gui` from the resulting model for each seed. Runs
are sequential, each in its own process on one thread. Success is measured on held-out layouts, greedily. Needs Chromium
and Playwright. Settings were chosen on seed 100.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.command import SOURCE, run_covey
from tiny import table, write_section

from covey.evaluation.statistics import wilson

PAGE = SOURCE.parent / "docs" / "gui.md"
DEMOS = 1500
HELD_OUT = 200  # pages
SFT = ["model.freeze_vision=false", "data.train_batch_size=32", "data.val_size=20"]
SFT += ["learner.lr=1e-3", "learner.warmup_steps=20", "learner.schedule=cosine", "loop.total_steps=150"]
PAGES = ["agent=gui", "agent.format=thought_action", "data=gui_pages", "data.options.kinds=[colour]"]
PAGES += ["data.options.varied=true", "data.options.viewport=[160,128]", "data.options.max_turns=1"]
RL = ["algorithm=grpo", "model.freeze_vision=false", "data.train_batch_size=8", "rollout.group_size=8"]
RL += ["rollout.max_tokens=32", "learner.lr=3e-4", "loop.total_steps=40", f"data.val_size={HELD_OUT}"]
RL += ["agent.browsers=1", "loop.save_final=false"]
EVAL = "eval/greedy/given"


def covey(command: str, words: Sequence[str], out: Path) -> tuple[Path, float]:
    """The run's folder, and the seconds of the whole command."""
    before = set(out.glob("*/*"))
    start = time.perf_counter()
    run_covey([command, *words, f"logging.output_dir={out}", "resume=disable", "loop.threads=1"])
    (folder,) = set(out.glob("*/*")) - before
    return folder, time.perf_counter() - start


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def imitated(out: Path, extra: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """The model after the demonstrations."""
    pages, start = out / "pages", time.perf_counter()
    paths = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(SOURCE.parent / "examples" / "gui.py"), str(pages), "--demos", str(DEMOS)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": paths})
    made = time.perf_counter() - start
    files = [f"data.train_files={pages / 'demos.jsonl'}", f"data.val_files={pages / 'val.jsonl'}"]
    run, seconds = covey("sft", [f"model.name={pages / 'model'}", *files, *SFT, *extra], out)
    return max((run / "checkpoints").glob("step-*")) / "model", {"demonstrations_s": made, "sft_s": seconds}


def one_seed(seed: int, model: Path, out: Path, extra: Sequence[str]) -> dict[str, Any]:
    run, seconds = covey("train", [f"model.name={model}", *PAGES, *RL, f"seed={seed}", *extra], out)
    steps, evaluations = records(run, "step"), records(run, "eval")
    failed = [value for s in steps for name, value in s["metrics"].items() if name.startswith("episodes/failed/")]
    return {
        "seed": seed,
        "success": [(e["step"], e["metrics"][EVAL]) for e in evaluations],
        "reward": [s["metrics"].get("reward/unfiltered_mean", s["metrics"]["reward/mean"]) for s in steps],
        "failed": sum(failed),
        "training_s": sum(s["metrics"]["timing/step"] for s in steps),
        "seconds": seconds,
    }


def with_interval(share: float) -> str:
    low, high = wilson(share, HELD_OUT)
    return f"{100 * share:.1f} % ({100 * low:.0f} to {100 * high:.0f})"


def text(found: dict[str, Any]) -> str:
    header = ("seed", "success on held-out layouts: before", "after", "training reward, first → last five steps")
    rows = [
        [
            str(row["seed"]),
            *(with_interval(row["success"][at][1]) for at in (0, -1)),
            f"{statistics.fmean(row['reward'][:5]):.2f} → {statistics.fmean(row['reward'][-5:]):.2f}",
            f"{row['seconds'] / 60:.1f} min",
        ]
        for row in found["seeds"]
    ]
    minutes = (found["demonstrations_s"] / 60, found["sft_s"] / 60)
    failed = sum(row["failed"] for row in found["seeds"])
    return (
        table((*header, "time"), rows)
        + f"\n\nGreedy, on {HELD_OUT} pages; intervals are Wilson's 95 %. Times are those of a shared machine: "
        + f"{minutes[0]:.1f} minutes for the demonstrations, {minutes[1]:.1f} for `covey sft`, and the time of each "
        + f"`covey train` with its evaluations and start. Episodes failed by the browser: {failed:.0f}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark-gui"))
    parser.add_argument("--model", type=Path, default=None, help="what imitation has made, to leave that out")
    parser.add_argument("--extra", nargs="*", default=[], help="further settings of every run")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/gui_seeds.json"))
    parser.add_argument("--write", action="store_true", help="write the table into docs/gui.md")
    chosen = parser.parse_args()
    times = {"demonstrations_s": 0.0, "sft_s": 0.0}
    model = chosen.model
    if model is None:
        model, times = imitated(chosen.out, chosen.extra)
        print(f"imitation: {model}", flush=True)
    found: dict[str, Any] = {**times, "model": str(model), "seeds": []}
    for seed in chosen.seeds:
        found["seeds"].append(one_seed(seed, model, chosen.out, chosen.extra))
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(found, indent=1))
        print(text(found), flush=True)
    if chosen.write:
        write_section("gui_seeds", text(found), PAGE)


if __name__ == "__main__":
    main()
