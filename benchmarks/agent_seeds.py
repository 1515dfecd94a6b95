"""A small agent that learns to use a calculator: demonstrations, then reinforcement learning, with five seeds.

    .venv/bin/python benchmarks/agent_seeds.py [--seeds 0 1 2 3 4] [--picture docs/images/calculator.png]

Runs `covey sft data=calculator` once on a few hundred demonstrations, then `covey train --config-name calculator` from
the resulting model for each seed. Runs are sequential, each in its own process. Prints accuracy on held-out tasks and
tool use before and after, and draws all curves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from kit.command import run_covey

SFT = ["data=calculator", "data.train_size=200", "data.val_size=8", "data.train_batch_size=25", "learner.lr=1.5e-5"]
SFT += ["eval.before=false", "logging.experiment=calculator-sft"]
EVAL = "eval/greedy/number"


def covey(command: str, words: list[str], out: Path) -> tuple[Path, float]:
    """The run's folder, and the seconds of the whole command."""
    before = set(out.glob("*/*"))
    start = time.perf_counter()
    run_covey([command, *words, f"logging.output_dir={out}", "resume=disable"])
    (folder,) = set(out.glob("*/*")) - before
    return folder, time.perf_counter() - start


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def last_model(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*")) / "model"


def one_seed(seed: int, model: Path, out: Path, extra: list[str]) -> dict[str, Any]:
    words = ["--config-name", "calculator", f"model.name={model}", f"seed={seed}", "loop.save_final=false", *extra]
    run, seconds = covey("train", words, out)
    evaluations, steps = records(run, "eval"), records(run, "step")
    return {
        "seed": seed,
        "training_seconds": sum(step["metrics"]["timing/step"] for step in steps),
        "seconds": seconds,
        "accuracy": [(e["step"], e["metrics"][EVAL]) for e in evaluations],
        "reward": [_reward(step["metrics"]) for step in steps],
        "tool_errors": [step["metrics"].get("agent/tool_errors", 0.0) for step in steps],
        "tool_calls": [step["metrics"].get("agent/tool_calls", 0.0) for step in steps],
    }


def _reward(metrics: dict[str, float]) -> float:
    """Mean reward of all episodes, including those of zero-variance groups."""
    return metrics.get("reward/unfiltered_mean", metrics["reward/mean"])


def correct_use(found: dict[str, Any], which: slice) -> float:
    """Tool calls without an error, per episode."""
    pairs = list(zip(found["tool_calls"], found["tool_errors"], strict=True))[which]
    return statistics.fmean(calls * (1 - errors) for calls, errors in pairs)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| seed | accuracy, held out: after imitation → after RL | reward, first → last three steps | sound tool calls "
        "per episode, first → last three steps | RL, s | with evaluations and start, s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        first, last = row["accuracy"][0][1], row["accuracy"][-1][1]
        early, late = statistics.fmean(row["reward"][:3]), statistics.fmean(row["reward"][-3:])
        use = [correct_use(row, slice(0, 3)), correct_use(row, slice(-3, None))]
        lines.append(
            f"| {row['seed']} | {100 * first:.0f} → **{100 * last:.0f}** % | {early:.2f} → {late:.2f} | "
            f"{use[0]:.2f} → {use[1]:.2f} | {row['training_seconds']:.0f} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for row in rows:
        steps = range(1, len(row["reward"]) + 1)
        smooth = [statistics.fmean(row["reward"][max(0, i - 2) : i + 1]) for i in range(len(row["reward"]))]
        left.plot(steps, smooth, label=f"seed {row['seed']}")
        right.plot(*zip(*row["accuracy"], strict=True), marker="o", label=f"seed {row['seed']}")
    left.set(title="training reward (mean of three steps)", xlabel="step", ylim=(0, 1))
    right.set(title="accuracy on 60 held-out tasks, greedy", xlabel="step", ylim=(0, 1))
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark-agent"))
    parser.add_argument("--model", type=Path, default=None, help="what imitation has made, to leave that out")
    parser.add_argument("--extra", nargs="*", default=[], help="further settings of every run")
    parser.add_argument("--picture", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/agent_seeds.json"))
    options = parser.parse_args()
    model = options.model
    if model is None:
        imitated, seconds = covey("sft", SFT, options.out)
        model = last_model(imitated)
        print(f"imitation: {seconds:.0f} s, {model}", flush=True)
    rows = []
    for seed in options.seeds:
        rows.append(one_seed(seed, model, options.out, options.extra))
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1))
        print(table(rows), flush=True)
    if options.picture is not None:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
