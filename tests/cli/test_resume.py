"""Runs that start from other runs: extended, continued with other settings, branched off a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import covey
from covey.cli.main import main
from covey.telemetry.figures import by_the_machine

REWARD = """
def variety(final_answer):
    return len(set(final_answer)) / 10
"""
SMALL = [
    *("reward=reward.py:variety", "data.val_size=4", "data.train_batch_size=2", "rollout.group_size=4"),
    *("rollout.max_tokens=6", "learner.lr=1e-3", "eval.every=2", "loop.save_every=2", "loop.threads=1"),
]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text(REWARD)


def train(*words: str) -> int:
    return main(["train", *SMALL, *words])


def runs(output: str = "outputs") -> list[Path]:
    """In the order in which they began."""
    found = (path.parent for path in Path(output).glob("*/*/run.json"))
    return sorted(found, key=lambda run: info(run)["number"])


def info(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "run.json").read_text())
    return found


def weights(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors").read_bytes()


def optimizer(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step-{step:06d}" / "optimizer.safetensors").read_bytes()


def records(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without timings and memory."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in found:
        record["metrics"] = {k: v for k, v in record["metrics"].items() if not by_the_machine(k)}
    return found


def test_a_run_is_the_model_that_another_one_starts_from(tiny_model_folder: Path) -> None:
    """model=RUN takes the best checkpoint, as covey eval does; model=CHECKPOINT that one."""
    assert train(f"model={tiny_model_folder}", "loop.total_steps=4", "algorithm=grpo", "loop.keep_last=4") == 0
    (first,) = runs()
    best = json.loads((first / "checkpoints/step-000004/state.json").read_text())["best"]["step"]
    other = 6 - best  # of the checkpoints 2 and 4
    for named, step in ((first, best), (first / f"checkpoints/step-{other}", other)):
        assert train(f"model={named}", "loop.total_steps=1", "learner.lr=0", "algorithm=grpo") == 0
        started = runs()[-1]
        folder = first / "checkpoints" / f"step-{step:06d}" / "model"
        assert info(started)["model"] == str(folder)
        assert yaml.safe_load((started / "config.yaml").read_text())["model"]["name"] == str(folder)
        assert weights(started, 1) == weights(first, step)
    run = covey.train(str(first), "sort", "exact", "grpo", **{"loop.total_steps": 1, "rollout.max_tokens": 4})
    assert info(run.path)["model"].startswith(str(first / "checkpoints"))


def test_an_empty_run_is_no_model(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["loop.save_final=false", "loop.save_every=0", "eval.every=0", "loop.total_steps=1"]
    assert train(f"model={tiny_model_folder}", *words) == 0
    assert train(f"model={runs()[0]}", *words) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


def test_demonstrations_first_and_then_rewards(tiny_model_folder: Path) -> None:
    rows = [{"question": f"q {i}", "answer": str(i)} for i in range(4)]
    Path("demos.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["data.train_files=demos.jsonl", "data.train_batch_size=2", "loop.total_steps=1"]
    assert main(["sft", f"model={tiny_model_folder}", *words]) == 0
    assert train(f"model={runs()[0]}", "loop.total_steps=1", "learner.lr=0") == 0
    first, second = runs()
    assert weights(first, 1) == weights(second, 1) != (tiny_model_folder / "model.safetensors").read_bytes()
