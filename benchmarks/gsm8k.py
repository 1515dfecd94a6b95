"""A real model learns grade-school mathematics on one GPU: GSM8K before and after ten minutes of GRPO and of GVPO.

    python benchmarks/gsm8k.py --model qwen2.5-coder-0.5b-instruct/ --data gsm8k/ [--picture docs/images/gsm8k.png]

Both algorithms run at the same time on one GPU, each in two parts, of which the second resumes the first. They are
evaluated greedily on the whole test split: before training, every 25 steps, and at the end. `--read FOLDER` reports the
runs of an earlier call instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kit.command import run_covey

ALGORITHMS: dict[str, list[str]] = {"grpo": [], "gvpo": ["algorithm.reference=initial", "algorithm.beta=0.1"]}
# Inside quotes, Hydra reads a backslash as itself, unless a quote follows.
SYSTEM = r'"Solve the problem step by step. Put the final answer in \boxed{}."'
SETTINGS = [
    *("reward=math_equal", f"data.system_prompt={SYSTEM}", "data.train_batch_size=64"),
    *("rollout.group_size=8", "rollout.max_tokens=400", "rollout.max_sequences=512", "rollout.memory=0.25"),
    *("learner.lr=3e-6", "learner.warmup_steps=5", "learner.micro_batch_tokens=10240"),
    *("loop.total_steps=1000", "loop.keep_last=1", "eval.every=25", "logging.experiment=gsm8k"),
]
EVAL = "eval/greedy/math_equal"


def covey(command: str, words: list[str], log: Path) -> None:
    """Run a command and append its output to a file."""
    with log.open("ab") as file:
        run_covey([command, *words], stdout=file, stderr=file)


def one(algorithm: str, model: Path, data: Path, minutes: list[float], out: Path) -> None:
    """All parts of one algorithm, then the last evaluation."""
    words = [f"algorithm={algorithm}", *ALGORITHMS[algorithm], f"model.name={model}", *SETTINGS]
    words += [f"logging.output_dir={out / algorithm}"]
    words += [f"data.train_files={data / 'train.jsonl'}", f"data.val_files={data / 'test.jsonl'}"]
    log = out / f"{algorithm}.log"
    for part in minutes:
        covey("train", [*words, f"loop.max_minutes={part}"], log)
    last = max((out / algorithm).glob("*/*/checkpoints/step-*"))
    covey("eval", [str(last), "--json", str(out / f"{algorithm}-after.json")], log)
    (metrics,) = (out / algorithm).glob("*/*/metrics.jsonl")
    (out / f"{algorithm}-metrics.jsonl").write_text(metrics.read_text())


def read(out: Path, algorithm: str) -> dict[str, Any]:
    records = [json.loads(line) for line in (out / f"{algorithm}-metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [(r["step"], r["metrics"][EVAL]) for r in records if r["kind"] == "eval"]
    after = json.loads((out / f"{algorithm}-after.json").read_text())
    return {
        "accuracy": [*evaluations, (len(steps), after[EVAL])],
        "reward": [step["metrics"]["reward/mean"] for step in steps],
        "seconds": sum(step["metrics"]["timing/step"] for step in steps),
        "tokens": sum(step["metrics"]["perf/generated_tokens"] for step in steps),
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = ["| algorithm | accuracy, 1,319 test problems: before → after | reward, first → last ten steps | steps | "
             "training, s | sampled tokens |", "|---|---|---|---|---|---|"]  # fmt: skip
    for name, row in found.items():
        first, last = row["accuracy"][0][1], row["accuracy"][-1][1]
        reward = [statistics.fmean(row["reward"][:10]), statistics.fmean(row["reward"][-10:])]
        lines.append(
            f"| {name} | {100 * first:.1f} → **{100 * last:.1f}** % | {reward[0]:.2f} → {reward[1]:.2f} | "
            f"{len(row['reward'])} | {row['seconds']:.0f} | {row['tokens'] / 1e6:.1f} M |"
        )
    return "\n".join(lines)


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, row in found.items():
        smooth = [statistics.fmean(row["reward"][max(0, i - 4) : i + 1]) for i in range(len(row["reward"]))]
        left.plot(range(1, len(smooth) + 1), smooth, label=name)
        right.plot(*zip(*row["accuracy"], strict=True), marker="o", label=name)
    left.set(title="training reward (mean of five steps)", xlabel="step")
    right.set(title="accuracy on the test split, greedy", xlabel="step")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder")
    parser.add_argument("--data", type=Path, help="the folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--minutes", type=float, nargs="+", default=[7, 3], help="of the parts")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark-gsm8k"))
    parser.add_argument("--read", type=Path, default=None, help="the --out of an earlier call")
    parser.add_argument("--picture", type=Path, default=None)
    options = parser.parse_args()
    if options.read is None:
        if options.model is None or options.data is None:
            parser.error("--model and --data are needed")
        options.out.mkdir(parents=True)
        with ThreadPoolExecutor(len(ALGORITHMS)) as at_once:
            list(
                at_once.map(
                    lambda name: one(name, options.model, options.data, options.minutes, options.out), ALGORITHMS
                )
            )
    found = {name: read(options.read or options.out, name) for name in ALGORITHMS}
    print(table(found))
    if options.picture is not None:
        draw(found, options.picture)


if __name__ == "__main__":
    main()
