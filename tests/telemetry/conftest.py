"""A run that never trained: its facts and its folder, with numbers that are easy to check by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.telemetry import RunInfo


@pytest.fixture
def info(tmp_path: Path) -> RunInfo:
    return RunInfo(
        folder=tmp_path / "run",
        title="sort-gvpo",
        algorithm="gvpo",
        model="smollm2-135m",
        task="sort",
        total_steps=40,
        reward_names=("sorted", "sorted/lenient"),
        trained_reward="sorted",
        config={"seed": 0},
    )


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run's folder from its metric records, as the loop would have."""

    def make(records: list[dict[str, Any]], name: str = "finished", **facts: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        run = {
            "project": "covey",
            "experiment": "run",
            "fingerprint": "abc",
            "status": "finished",
            "title": "sort-gvpo",
            "algorithm": "gvpo",
            "model": "smollm2-135m",
            "task": "sort",
            "total_steps": 12,
            "reward_names": ["sorted", "sorted/lenient"],
            "trained_reward": "sorted",
            "started": "2026-01-31T14:05:09",
            "command": "covey train algorithm=gvpo",
            "versions": {"python": "3.11"},
            "threads": 2,
        }
        (folder / "run.json").write_text(json.dumps(run | facts))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return folder

    return make


@pytest.fixture
def records() -> list[dict[str, Any]]:
    """12 steps with rewards 0.00, 0.05 … 0.55, and evaluations after 0 and 12 updates."""
    steps = [
        {
            "kind": "step",
            "step": index,
            "metrics": {
                "reward/mean": 0.05 * index,
                "perf/generated_tokens": 1000,
                "timing/rollout": 3.0,
                "timing/update": 1.0,
                "timing/step": 4.0,
            },
        }
        for index in range(12)
    ]
    return [_evaluation(0, 0.125, 0.25, 40.0), *steps, _evaluation(12, 0.5, 0.75, 30.0)]


def _evaluation(step: int, strict: float, lenient: float, length: float) -> dict[str, Any]:
    metrics = {
        "eval/accuracy": strict,
        "eval/greedy/sorted": strict,
        "eval/greedy/sorted/lenient": lenient,
        "eval/sampled/sorted": strict / 2,
        "eval/greedy/length_mean": length,
        "eval/greedy/truncated": 0.0,
        "timing/evaluate": 6.0,
    }
    return {"kind": "eval", "step": step, "metrics": metrics}
