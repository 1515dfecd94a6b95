"""Small whole runs, and what is compared between them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import covey
from covey.cluster import start
from covey.cluster.placement import Node
from covey.config.schema import ClusterConfig
from covey.rollout.collector import TrainingSource

STEPS, TASKS, ATTEMPTS = 3, 2, 4
SETTINGS = {
    **{"data.train_batch_size": TASKS, "rollout.group_size": ATTEMPTS, "rollout.max_tokens": 16, "loop.threads": 1},
    **{"loop.total_steps": STEPS, "loop.save_every": 1, "learner.lr": 1e-3, "resume": "disable", "logging.to": []},
}


@contextmanager
def small_cluster(cpus: int = 4) -> Iterator[start.Cluster]:
    """Of our own, with more places than this machine may have cores. Runs inside of it join it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "this_machine", lambda: Node(start.LOCALHOST, cpus))
        with start.open_cluster(ClusterConfig(name="ray")) as cluster:
            yield cluster


def varied(task: Any, episode: Any) -> float:
    """A reward that every answer has another of."""
    return len(set(episode.final_answer)) / 10


@dataclass
class Outcome:
    run: Any
    trained: list[list[str]]  # tasks of each step that was learned from, also of a run before a restart
    failures: Counter[str]

    def weights(self) -> dict[str, torch.Tensor]:
        (path,) = (self.run.path / "checkpoints" / f"step-{self.run.total_steps:06d}" / "model").glob("*.safetensors")
        return load_file(path)

    def steps(self) -> list[int]:
        lines = (self.run.path / "metrics.jsonl").read_text().splitlines()
        return [row["step"] for row in map(json.loads, lines) if row["kind"] == "step"]


def trained(model: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str = "grpo", **settings: Any) -> Outcome:
    seen: list[list[str]] = []
    failures: Counter[str] = Counter()
    following = TrainingSource._collected

    def noted(source: TrainingSource, *given: Any, **named: Any) -> Any:
        found = following(source, *given, **named)
        seen.append([group.task.id for group in found.groups for _ in group.episodes])
        failures.update(found.failures)
        return found

    monkeypatch.setattr(TrainingSource, "_collected", noted)
    tasks = [{"question": f"say it, {i}", "answer": "x"} for i in range(2 * TASKS)]
    run = covey.train(str(model), tasks, varied, algorithm, **(SETTINGS | settings))
    monkeypatch.setattr(TrainingSource, "_collected", following)
    return Outcome(run, seen, failures)


def difference(one: Outcome, other: Outcome) -> float:
    mine, theirs = one.weights(), other.weights()
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)
