"""A small model learns to click on web pages: demonstrations, then reinforcement learning, with three seeds.

    python benchmarks/gui_seeds.py [--seeds 0 1 2]               the tables on stdout
    python benchmarks/gui_seeds.py --write                       also into docs/gui.md

Runs `examples/gui.py` and `covey sft` once, then `covey train agent=gui` on screenshots from the resulting model for
each seed, and `covey eval` of all models on live pages. Runs are sequential, each in its own process on one thread.
Success is measured on held-out layouts. Needs Chromium and Playwright. Settings were chosen on seed 100.
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
HELD_OUT = 200  # screenshots
LIVE = 50  # pages
SFT = ["model.freeze_vision=false", "data.train_batch_size=32", "data.val_size=50", "learner.lr=2e-3"]
SFT += ["learner.warmup_steps=50", "learner.schedule=cosine", "loop.total_steps=3000"]
RL = ["agent=gui", "agent.format=thought_action", "reward=click_in_box", "algorithm=grpo", "model.freeze_vision=false"]
RL += ["data.train_batch_size=16", "rollout.group_size=8", "rollout.max_tokens=40", "learner.lr=3e-4"]
RL += ["loop.total_steps=60", "eval.modes=[greedy,sampled]"]
PAGES = ["agent=gui", "agent.format=thought_action", "data=gui_pages", "data.options.kinds=[colour]"]
PAGES += ["data.options.buttons=4", "data.options.varied=true", "data.options.viewport=[112,96]"]
PAGES += ["data.options.max_turns=1", "rollout.max_tokens=40", "agent.browsers=1"]
MODES = ("greedy", "sampled")


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


def last_model(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*")) / "model"


def make_data(folder: Path, words: Sequence[str]) -> float:
    start = time.perf_counter()
    paths = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(SOURCE.parent / "examples" / "gui.py"), str(folder), "--val", str(HELD_OUT), *words]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": paths})
    return time.perf_counter() - start


def one_seed(seed: int, model: Path, pages: Path, out: Path, extra: Sequence[str]) -> dict[str, Any]:
    files = [f"data.train_files={pages / 'train.jsonl'}", f"data.val_files={pages / 'val.jsonl'}"]
    run, seconds = covey("train", [f"model.name={model}", *files, *RL, f"seed={seed}", *extra], out)
    steps, evaluations = records(run, "step"), records(run, "eval")
    return {
        "seed": seed,
        "model": str(last_model(run)),
        "success": {
            mode: [e["metrics"][f"eval/{mode}/click_in_box"] for e in (evaluations[0], evaluations[-1])]
            for mode in MODES
        },
        "reward": [s["metrics"].get("reward/unfiltered_mean", s["metrics"]["reward/mean"]) for s in steps],
        "training_s": sum(s["metrics"]["timing/step"] for s in steps),
        "seconds": seconds,
    }


def live(models: Sequence[str], out: Path, extra: Sequence[str]) -> list[float]:
    """Success of each model on live pages, greedily."""
    run_covey(["eval", *models, *PAGES, "--limit", str(LIVE), "--out", str(out / "live"), *extra])
    return [result["pass@1"]["value"] for result in json.loads((out / "live" / "results.json").read_text())["results"]]


def with_interval(share: float, pages: int) -> str:
    low, high = wilson(share, pages)
    return f"{100 * share:.1f} % ({100 * low:.0f} to {100 * high:.0f})"


def text(found: dict[str, Any]) -> str:
    header = ("seed", "greedy: before", "after", "sampled: before", "after", "training reward, first → last five steps")
    rows = [
        [
            str(row["seed"]),
            *(with_interval(share, HELD_OUT) for mode in MODES for share in row["success"][mode]),
            f"{statistics.fmean(row['reward'][:5]):.2f} → {statistics.fmean(row['reward'][-5:]):.2f}",
            f"{row['seconds'] / 60:.1f} min",
        ]
        for row in found["seeds"]
    ]
    lines = [
        table((*header, "time"), rows),
        "",
        f"Success on {HELD_OUT} screenshots of held-out layouts, with Wilson's 95 % intervals; sampled at temperature "
        f"1. On a shared machine the data took {found['data_s'] / 60:.1f} minutes and `covey sft` "
        f"{found['sft_s'] / 60:.1f}; the last column is the time of `covey train` with its evaluations and start.",
    ]
    if found["live"]:
        shares = ", ".join(f"{name} {with_interval(share, LIVE)}" for name, share in found["live"].items())
        lines += ["", f"On {LIVE} live pages of held-out layouts in Chromium, greedily: {shares}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark-gui"))
    parser.add_argument("--data", nargs="*", default=[], help="further options of examples/gui.py")
    parser.add_argument("--extra", nargs="*", default=[], help="further settings of every run")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/gui_seeds.json"))
    parser.add_argument("--no-live", action="store_true", help="leave out the evaluation on live pages")
    parser.add_argument("--write", action="store_true", help="write the table into docs/gui.md")
    chosen = parser.parse_args()
    pages = chosen.out / "pages"
    data_s = make_data(pages, chosen.data)
    files = [f"data.train_files={pages / 'demos.jsonl'}", f"data.val_files={pages / 'val-demos.jsonl'}"]
    run, sft_s = covey("sft", [f"model.name={pages / 'model'}", *files, *SFT, *chosen.extra], chosen.out)
    found: dict[str, Any] = {"data_s": data_s, "sft_s": sft_s, "seeds": [], "live": {}}
    for seed in chosen.seeds:
        found["seeds"].append(one_seed(seed, last_model(run), pages, chosen.out, chosen.extra))
        save(found, chosen.json)
    if not chosen.no_live:
        models = [str(last_model(run)), *(row["model"] for row in found["seeds"])]
        names = ["demonstrations alone", *(f"seed {seed}" for seed in chosen.seeds)]
        scores = live(models, chosen.out, chosen.extra)
        found["live"] = dict(zip(names, scores, strict=True))
        save(found, chosen.json)
    if chosen.write:
        write_section("gui_seeds", text(found), PAGE)


def save(found: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))
    print(text(found), flush=True)


if __name__ == "__main__":
    main()
