"""A run killed at any moment ends exactly as if it had not been."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.telemetry.key_metrics import is_machine_dependent

# A reward with some variety for a random model, that kills the run at a given call. It runs in a worker, a child of a
# child of the run, and there are several: a file counts their calls.
REWARD = """
import os, pathlib, signal
def variety(final_answer):
    with open("calls", "ab", buffering=0) as counter:
        counter.write(b".")
        calls = counter.tell()
    if calls == int(os.environ.get("KILL_AT_CALL", "0")):
        run = int(pathlib.Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(run, signal.SIGKILL)
    return len(set(final_answer)) / 10
def short(final_answer):
    return -len(final_answer)
"""
EVALUATION, STEP = 8, 3 * 4  # reward calls of the evaluation before training, and of each step


SETTINGS = [
    *("reward=reward.py:variety", "data.val_size=8", "data.train_batch_size=3", "rollout.group_size=4"),
    *("rollout.max_tokens=8", "learner.lr=1e-3", "loop.total_steps=6", "loop.save_every=3", "eval.every=2"),
    "loop.threads=2",
]


def train_here(folder: Path, model: Path, *settings: str) -> None:
    """In this process, which is quicker if nothing is to be killed."""
    (folder / "reward.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", f"model={model}", *SETTINGS, *settings]) == 0


def train(folder: Path, model: Path, *settings: str, kill_at_call: int = 0) -> int:
    (folder / "reward.py").write_text(REWARD)
    command = [sys.executable, "-m", "covey.cli.main", "train", f"model={model}", *SETTINGS, *settings]
    environment = os.environ | {"KILL_AT_CALL": str(kill_at_call)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, -signal.SIGKILL), done.stdout + done.stderr
    return done.returncode


def outcome(folder: Path) -> dict[str, Any]:
    """Hashes of the final weights and optimiser state, and every record without its timings."""
    (run,) = folder.glob("outputs/*/*")
    last = run / "checkpoints" / "step-000006"
    found: dict[str, Any] = {
        name: hashlib.sha256((last / name).read_bytes()).hexdigest()
        for name in ("model/model.safetensors", "optimizer.safetensors", "critic.safetensors")
        if (last / name).exists()
    }
    found |= {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (last / "model").glob("adapter*.safetensors")}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("time", None)
        for name in [n for n in record["metrics"] if is_machine_dependent(n)]:
            del record["metrics"][name]
    found["records"] = records
    found["episodes"] = (run / "episodes.jsonl").read_text()
    found["algorithm"] = json.loads((last / "state.json").read_text())["algorithm"]
    found["status"] = json.loads((run / "run.json").read_text())["status"]
    return found


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), marks=pytest.mark.slow),  # tests/faults/test_crash.py kills such a run at many places
        pytest.param(("algorithm=grpo", "model.dtype=bfloat16", "learner.mini_batch_size=2"), marks=pytest.mark.slow),
        pytest.param(("model.lora.rank=4",), marks=pytest.mark.slow),
        pytest.param(("algorithm.reference=moving", "algorithm.reference_every=2"), marks=pytest.mark.slow),
        pytest.param(
            ("algorithm=grpo", "algorithm.kl_coef=0.1", "algorithm.reference_every=2", "model.lora.rank=4"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("algorithm=ppo", "critic.warmup_steps=2", "algorithm.kl_coef=0.1", "algorithm.kl_target=0.01"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("algorithm=dgdo", "algorithm.warmup_steps=1", "reward=[reward.py:variety,reward.py:short]"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["gvpo", "grpo-bfloat16", "lora", "moving", "moving-lora", "ppo-adaptive-kl", "dgdo"],
)
def test_killed_in_the_middle_of_step_four(tmp_path: Path, tiny_model_folder: Path, settings: tuple[str, ...]) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    train_here(whole, tiny_model_folder, *settings)
    # evaluations: before the first step and after the second; then half of step 4's episodes
    middle = EVALUATION * 2 + STEP * 3 + STEP // 2
    assert train(broken, tiny_model_folder, *settings, kill_at_call=middle) == -signal.SIGKILL
    assert train(broken, tiny_model_folder, *settings) == 0
    expected, found = outcome(whole), outcome(broken)
    assert len(expected["records"]) == 6 + 4  # steps, and evaluations at 0, 2, 4, 6
    assert len({json.dumps(r) for r in expected["records"]}) == 10
    assert found["status"] == "finished"
    assert found == expected


@pytest.mark.slow
def test_a_run_in_parts_of_limited_time_equals_one_run(tmp_path: Path, tiny_model_folder: Path) -> None:
    """loop.max_minutes=0 ends after every step, also between checkpoints; without a limit it runs to the end."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    train_here(whole, tiny_model_folder)
    for steps in (1, 2):
        train_here(parts, tiny_model_folder, "loop.max_minutes=0")
        (run,) = parts.glob("outputs/*/*")
        assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
        assert (run / "checkpoints" / f"step-{steps:06d}").is_dir()
    train_here(parts, tiny_model_folder, "loop.max_minutes=100")
    assert outcome(parts) == outcome(whole)


def test_a_finished_run_is_not_resumed_and_a_new_one_starts(tmp_path: Path, tiny_model_folder: Path) -> None:
    for expected in (1, 2):
        train_here(tmp_path, tiny_model_folder, "loop.total_steps=1", "loop.save_every=0", "eval.before=false")
        assert len(list(tmp_path.glob("outputs/*/*/run.json"))) == expected


@pytest.mark.slow
def test_other_settings_do_not_continue_a_run(tmp_path: Path, tiny_model_folder: Path) -> None:
    early = EVALUATION + STEP + 2
    assert train(tmp_path, tiny_model_folder, kill_at_call=early) == -signal.SIGKILL
    train_here(tmp_path, tiny_model_folder, "learner.lr=2e-3", "loop.total_steps=1")
    assert len(list(tmp_path.glob("outputs/*/*/run.json"))) == 2
