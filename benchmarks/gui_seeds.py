"""A small model learns to click on web pages: imitation that stops early, then reinforcement learning, three seeds.

    python benchmarks/gui_seeds.py [--seeds 0 1 2]               the tables on stdout
    python benchmarks/gui_seeds.py --write                       also into docs/gui.md

Runs `examples/gui.py` once. For each seed: `covey sft`; `covey train agent=gui` on screenshots, from the first
checkpoint of the imitation (one every 100 steps) that clicks right on at least SHARE of 100 training screenshots, since
how soon a model gets there differs between seeds; and `covey eval` of both models on live pages. Runs are sequential,
each in its own process on one thread. Success is measured on held-out layouts. Needs Chromium and Playwright. Settings
were chosen on seed 100. A call that was stopped continues: finished runs in --out are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.command import SOURCE, run_covey
from tiny import table, write_section

from covey.evaluation.statistics import wilson

PAGE = SOURCE.parent / "docs" / "gui.md"
HELD_OUT = 400  # screenshots
LIVE = 100  # pages
SFT = ["model.freeze_vision=false", "data.train_batch_size=32", "data.val_size=50", "learner.lr=2e-3"]
SFT += ["learner.warmup_steps=50", "learner.schedule=cosine", "loop.total_steps=2000", "loop.save_every=100"]
SFT += ["loop.keep_last=20"]
SHARE = 0.4
TASK = ["agent=gui", "agent.format=thought_action", "reward=click_in_box", "rollout.max_tokens=40"]
RL = [*TASK, "algorithm=grpo", "model.freeze_vision=false"]
RL += ["data.train_batch_size=32", "rollout.group_size=16", "learner.lr=4e-4"]
RL += ["learner.warmup_steps=10", "loop.total_steps=300", "eval.every=100", "eval.modes=[greedy,sampled]"]
PAGES = ["agent=gui", "agent.format=thought_action", "data=gui_pages", "data.options.kinds=[colour]"]
PAGES += ["data.options.buttons=4", "data.options.varied=true", "data.options.viewport=[112,96]"]
PAGES += ["data.options.max_turns=1", "rollout.max_tokens=40", "agent.browsers=1"]
MODES = ("greedy", "sampled")


def covey(command: str, words: Sequence[str], out: Path) -> Path:
    """The run's folder. A finished run is not repeated."""
    if not (out / "done").is_file():
        run_covey([command, *words, f"logging.output_dir={out}", "loop.threads=1"])
        (out / "done").touch()
    (folder,) = out.glob("*/*")
    return folder


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def last_model(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*")) / "model"


def start_of_training(run: Path, pages: Path, out: Path) -> Path:
    """The first checkpoint whose success on training screenshots is at least SHARE; the last one if none is."""
    models = sorted(str(path / "model") for path in (run / "checkpoints").glob("step-*"))
    shown = [*TASK, f"data.val_files={pages / 'train.jsonl'}", f"data.train_files={pages / 'train.jsonl'}"]
    if not (out / "results.json").is_file():
        run_covey(["eval", *models, *shown, "--limit", "100", "--out", str(out)])
    results = json.loads((out / "results.json").read_text())["results"]
    shares = [result["pass@1"]["value"] for result in results]
    return Path(next((model for model, share in zip(models, shares, strict=True) if share >= SHARE), models[-1]))


def make_data(folder: Path, words: Sequence[str]) -> None:
    if (folder / "model").is_dir():  # written last
        return
    paths = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(SOURCE.parent / "examples" / "gui.py"), str(folder), "--val", str(HELD_OUT), *words]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": paths})


def one_seed(seed: int, pages: Path, out: Path, extra: Sequence[str]) -> dict[str, Any]:
    files = [f"data.train_files={pages / 'demos.jsonl'}", f"data.val_files={pages / 'val-demos.jsonl'}"]
    words = [f"model.name={pages / 'model'}", *files, *SFT, f"seed={seed}", *extra]
    imitation = covey("sft", words, out / f"sft-{seed}")
    start = start_of_training(imitation, pages, out / f"start-{seed}")
    files = [f"data.train_files={pages / 'train.jsonl'}", f"data.val_files={pages / 'val.jsonl'}"]
    words = [f"model.name={start}", *files, *RL, f"seed={seed}", *extra]
    run = covey("train", words, out / f"rl-{seed}")
    steps, evaluations = records(run, "step"), records(run, "eval")
    return {
        "seed": seed,
        "models": [str(start), str(last_model(run))],
        "imitation_steps": int(start.parent.name.removeprefix("step-")),
        "success": {mode: [e["metrics"][f"eval/{mode}/click_in_box"] for e in evaluations] for mode in MODES},
        "reward": [s["metrics"].get("reward/unfiltered_mean", s["metrics"]["reward/mean"]) for s in steps],
        "training_s": sum(s["metrics"]["timing/step"] for s in steps),
    }


def live(models: Sequence[str], out: Path, extra: Sequence[str]) -> list[float]:
    """Success of each model on live pages, greedily."""
    run_covey(["eval", *models, *PAGES, "--limit", str(LIVE), "--out", str(out / "live"), *extra])
    return [result["pass@1"]["value"] for result in json.loads((out / "live" / "results.json").read_text())["results"]]


def with_interval(share: float, pages: int) -> str:
    low, high = wilson(share, pages)
    return f"{100 * share:.1f} % ({100 * low:.0f} to {100 * high:.0f})"


def text(found: dict[str, Any]) -> str:
    header = (
        "seed",
        "steps of imitation",
        "greedy: before",
        "after",
        "sampled: before",
        "after",
        "training reward, first → last 20 steps",
    )
    rows = [
        [
            str(row["seed"]),
            str(row["imitation_steps"]),
            *(with_interval(row["success"][mode][at], HELD_OUT) for mode in MODES for at in (0, -1)),
            f"{statistics.fmean(row['reward'][:20]):.2f} → {statistics.fmean(row['reward'][-20:]):.2f}",
            f"{row['training_s'] / 60:.0f} min",
        ]
        for row in found["seeds"]
    ]
    curves = "; ".join(
        f"seed {row['seed']} {', '.join(f'{100 * share:.1f}' for share in row['success']['greedy'])}"
        for row in found["seeds"]
    )
    lines = [
        table((*header, "time of RL"), rows),
        "",
        f"Success on {HELD_OUT} screenshots of held-out layouts, with Wilson's 95 % intervals; sampled at temperature "
        f"1. Greedy success in per cent before RL and after each hundred steps: {curves}. Times are those of the steps "
        "on a shared machine.",
    ]
    if found["live"]:
        header = ("live pages, greedily", "before", "after")
        rows = [[name, *(with_interval(share, LIVE) for share in pair)] for name, pair in found["live"].items()]
        lines += ["", f"On {LIVE} live pages of held-out layouts in Chromium:", "", table(header, rows)]
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
    make_data(pages, chosen.data)
    found: dict[str, Any] = {"seeds": [], "live": {}}
    for seed in chosen.seeds:
        found["seeds"].append(one_seed(seed, pages, chosen.out, chosen.extra))
        save(found, chosen.json)
    if not chosen.no_live:
        models = [model for row in found["seeds"] for model in row["models"]]
        scores = live(models, chosen.out, chosen.extra)
        found["live"] = {f"seed {seed}": scores[2 * n : 2 * n + 2] for n, seed in enumerate(chosen.seeds)}
        save(found, chosen.json)
    if chosen.write:
        write_section("gui_seeds", text(found), PAGE)


def save(found: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))
    print(text(found), flush=True)


if __name__ == "__main__":
    main()
