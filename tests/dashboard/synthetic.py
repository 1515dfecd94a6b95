"""Synthetic run folders: healthy ones, and one for each fault."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from covey.telemetry.jsonl import PART_BYTES, PartWriter, finite

Floats = NDArray[np.float64]

INFO = {
    "project": "covey",
    "experiment": "made",
    "status": "finished",
    "kind": "rl",
    "title": "covey/made",
    "algorithm": "grpo",
    "model": "tiny",
    "task": "made up",
    "reward_names": ["exact"],
    "trained_reward": "exact",
    "started": "2026-01-31T14:05:09",
    "command": "covey train",
    "versions": {},
    "threads": 2,
    "fingerprint": "0",
}
RECORDED = Path(__file__).parent / "runs"
MARKUP = "<img src=x onerror=\"document.title='broken in'\"><script>document.title='broken in'</script>"
SECONDS = {"timing/rollout": 3.0, "timing/update": 1.5, "timing/publish": 0.5}


def healthy(steps: int = 100, seed: int = 0, noise: float = 0.05) -> tuple[dict[str, Floats], dict[int, float]]:
    """Series of a run that learns, and its held-out accuracy by the number of updates."""
    rng = np.random.default_rng(seed)
    t = np.linspace(0, 1, steps)

    def about(values: Any, spread: float) -> Floats:
        return np.asarray(values + spread * rng.standard_normal(steps))

    score = 0.2 + 0.6 * (1 - np.exp(-3 * t))
    series = {
        "reward/mean": about(score, noise).clip(0, 1),
        "reward/std": about(np.sqrt(score * (1 - score)), 0.02),
        "reward/exact/mean": about(score, noise).clip(0, 1),
        "policy/entropy": about(1.2 * np.exp(-1.2 * t), 0.05).clip(0.06),
        "policy/kl_old": about(np.zeros(steps), 0.003),
        "policy/ess": about(np.full(steps, 0.97), 0.01),
        "kl/reference": about(0.25 * t, 0.01).clip(0),
        "groups/flat": about(np.full(steps, 0.25), 0.1).clip(0, 1),
        "response/length_mean": about(120 + 20 * t, 6),
        "response/length_max": about(np.full(steps, 256.0), 0.1),
        "response/truncated": about(np.full(steps, 0.04), 0.02).clip(0, 1),
        "grad/norm": about(np.full(steps, 0.8), 0.2).clip(0.1) * np.where(rng.random(steps) < 0.03, 8, 1),
        "episodes/total": np.full(steps, 64.0),
        "episodes/failed": (rng.random(steps) < 0.1).astype(np.float64),
        "optim/skipped": np.zeros(steps),
        "perf/generated_tokens": about(np.full(steps, 8000.0), 300),
        "perf/tokens_per_second": about(np.full(steps, 2600.0), 90),
        "timing/step": np.full(steps, sum(SECONDS.values())),
        **{name: np.full(steps, value) for name, value in SECONDS.items()},
    }
    every = max(1, steps // 10)
    at = range(0, steps + 1, every)
    accuracy = {s: float(np.clip(score[min(s, steps - 1)] + 0.02 * rng.standard_normal(), 0, 1)) for s in at}
    return series, accuracy


def faulty(name: str, steps: int = 100, seed: int = 0) -> tuple[dict[str, Floats], dict[int, float]]:
    """A healthy run with one thing wrong."""
    series, accuracy = healthy(steps, seed)
    t = np.linspace(0, 1, steps)
    match name:
        case "reward_hacking":  # the reward goes on, accuracy turns after a third
            series["reward/mean"] = 0.2 + 0.7 * t
            accuracy = {s: v if 3 * s <= steps else max(0.1, 0.6 - 0.6 * (s / steps)) for s, v in accuracy.items()}
        case "entropy_collapse":
            series["policy/entropy"] = 1.2 * np.exp(-20 * t) + 0.004
        case "zero_variance":
            series["groups/flat"] = np.clip(0.3 + 3 * t, 0, 1)
        case "kl_growth":
            series["kl/reference"] = 0.02 * np.exp(4.5 * t)
        case "truncation":
            series["response/truncated"] = np.clip(0.03 + 0.6 * t**2, 0, 1)
        case "divergence":
            series["grad/norm"] = 0.5 * np.exp(4 * t)
        case "failures":
            series["episodes/failed"] = np.where(t > 0.5, 20.0, 0.0)
            series["episodes/failed/tool_timeout"] = series["episodes/failed"]
        case "off_policy":
            series["policy/ess"] = 0.95 - 0.7 * t
        case "reward_tradeoff":
            series["reward/format/mean"] = 0.9 - 0.6 * t
        case "anchor_pull":  # the policy drifts from its anchor faster than the rewards pay for
            series |= {"gvpo/pull": 0.6 * t, "gvpo/reward_spread": np.full(steps, 0.35)}
            series["gvpo/mean_log_ratio"] = 10 * t
            accuracy = {s: min(v, 0.5) for s, v in accuracy.items()}
        case "length_correlation":
            series["response/length_mean"] = 100 + 200 * t
        case _:
            raise AssertionError(name)
    return series, accuracy


FAULTS = ("reward_hacking", "entropy_collapse", "zero_variance", "kl_growth", "truncation", "divergence")
MORE_FAULTS = ("failures", "off_policy", "reward_tradeoff", "anchor_pull")


def write_run(
    folder: Path,
    series: Mapping[str, Floats],
    accuracy: Mapping[int, float],
    *,
    status: str = "finished",
    total: int | None = None,
    config: Mapping[str, Any] | None = None,
    **info: Any,
) -> Path:
    """run.json, config.yaml and metrics.jsonl."""
    steps = len(next(iter(series.values())))
    folder.mkdir(parents=True, exist_ok=True)
    said = INFO | {"status": status, "total_steps": total or steps} | info
    (folder / "run.json").write_text(json.dumps(said))
    (folder / "config.yaml").write_text(yaml.safe_dump(config or {"data": {"val_size": 200}, "learner": {"lr": 1e-6}}))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(steps + 1):
            if step in accuracy:
                values = {"eval/accuracy": accuracy[step], "eval/greedy/exact": accuracy[step], "timing/evaluate": 2.0}
                file.write(json.dumps({"kind": "eval", "step": step, "metrics": values}) + "\n")
            if step < steps:
                values = {name: float(column[step]) for name, column in series.items()}
                file.write(json.dumps({"kind": "step", "step": step, "metrics": finite(values)}) + "\n")
    return folder


def episode(step: int, attempt: int, *, tokens: int = 12, reward: float | None = 1.0, **changes: Any) -> dict[str, Any]:
    """One line of episodes.jsonl, in the order that a run writes its fields."""
    words = [" word", " and", " then", "\n", " 42", " <b>", " é"]
    text = [words[(step + place) % len(words)] for place in range(tokens)]
    mask = [int(place % 6 != 5) for place in range(tokens)]
    advantage = 0.0 if reward is None else reward - 0.5
    return {
        "schema": 1,
        "step": step,
        "task_id": f"task-{step % 7}",
        "group": 0,
        "attempt": attempt,
        "messages": [
            {"role": "user", "content": f"Question {step % 7}?"},
            {"role": "assistant", "content": "".join(text)},
        ],
        "answer": "42",
        "rewards": {"exact": reward},
        "total_reward": reward,
        "advantage": advantage,
        "stop": "eos",
        "failure": None,
        "tools": [],
        "rows": [
            {
                "prompt_ids": [1, 2, 3],
                "response_ids": list(range(100, 100 + tokens)),
                "mask": mask,
                "text": text,
                "prompt_text": f"Question {step % 7}?",
                "logprobs": [-0.1 * (place % 30) * m for place, m in enumerate(mask)],
                "advantage": [advantage * m for m in mask],
                "ratio": [(0.5 + place % 3 / 2) * m for place, m in enumerate(mask)],
                "entropy": [0.2 * (place % 5) * m for place, m in enumerate(mask)],
                "versions": [step] * tokens,
            }
        ],
    } | changes


def write_episodes(folder: Path, episodes: list[dict[str, Any]], part_bytes: int = PART_BYTES) -> Path:
    path = folder / "episodes.jsonl"
    writer = PartWriter(path, 0, part_bytes)
    for one in episodes:
        writer.write(json.dumps(one).encode() + b"\n")
    writer.close()
    return path
