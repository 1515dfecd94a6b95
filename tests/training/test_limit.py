"""When a run's time is over: by the clock, or by SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.training.interrupts import time_limit
from covey.training.run import Run

SETTINGS = [
    *("data=sort", "algorithm=grpo", "data.val_size=1", "data.train_batch_size=2", "rollout.group_size=2"),
    *("rollout.max_tokens=2", "loop.total_steps=3", "eval.before=false", "eval.after=false", "logging.to=[]"),
]


def test_sigterm_ends_the_time_and_only_while_somebody_trains() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with time_limit(None) as limit:
        assert not limit.passed()
        os.kill(os.getpid(), signal.SIGTERM)
        assert limit.passed() and limit.reached
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread_the_signal_is_left_alone() -> None:
    found: list[Any] = []

    def train() -> None:
        with time_limit(0.0) as limit:
            found.extend([signal.getsignal(signal.SIGTERM), limit.passed()])

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM), True]


def test_a_run_that_is_told_to_end_leaves_a_checkpoint_and_goes_on(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train", "--unfinished", "75", f"model={tiny_model_folder}", *SETTINGS]
    step = Run._make_step

    async def signalled(self: Run, index: int) -> None:
        if index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        await step(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_make_step", signalled)
        assert main(command) == 75
    told = capsys.readouterr().err
    assert "stopped by SIGTERM; everything is saved, " in told
    assert "the same command continues from the last checkpoint, after step 2\n" in told
    (run,) = tmp_path.glob("outputs/*/*")
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    assert (run / "checkpoints" / "step-000002").is_dir()
    assert main(command) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]


def test_an_exit_code_is_a_small_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--unfinished", "300"]) == 2
    assert "between 0 and 255" in capsys.readouterr().err


def test_an_unplanned_checkpoint_is_not_the_best(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is evaluated; of a run that was left alone only the last would be saved, and so be the best."""
    monkeypatch.chdir(tmp_path)
    step = Run._make_step

    async def signalled(self: Run, index: int) -> None:
        if index == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        await step(self, index)

    command = ["train", f"model={tiny_model_folder}", *SETTINGS, "eval.every=1"]
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_make_step", signalled)
        assert main(command) == 143
    (state,) = (tmp_path / "outputs").glob("*/*/checkpoints/step-000001/state.json")
    assert json.loads(state.read_text())["best"] is None
