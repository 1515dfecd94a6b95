"""Ending a run early (by time, by SIGTERM), and garbage collection during a run."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.training.interrupts import freeze_garbage, freeze_more, time_limit
from covey.training.run import Run

SETTINGS = [
    *("data=sort", "algorithm=grpo", "data.val_size=1", "data.train_batch_size=2", "rollout.group_size=2"),
    *("rollout.max_tokens=2", "loop.total_steps=3", "eval.before=false", "eval.after=false", "logging.to=[]"),
]


def test_sigterm_ends_the_time_during_training_only() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with time_limit(None) as limit:
        assert not limit.passed()
        os.kill(os.getpid(), signal.SIGTERM)
        assert limit.passed() and limit.reached
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread_the_signal_is_not_handled() -> None:
    found: list[Any] = []

    def train() -> None:
        with time_limit(0.0) as limit:
            found.extend([signal.getsignal(signal.SIGTERM), limit.passed()])

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM), True]


def test_a_run_ended_by_sigterm_writes_a_checkpoint_and_resumes(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train", "--unfinished", "75", f"model={tiny_model_folder}", *SETTINGS]
    step = Run._sample_and_update

    async def signalled(self: Run, index: int) -> None:
        if index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        await step(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_sample_and_update", signalled)
        assert main(command) == 75
    output = capsys.readouterr().err
    assert "stopped by SIGTERM; everything is saved, and " in output
    assert "the same command continues from the last checkpoint, after step 2\n" in output
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
    """Every step is evaluated, but without the signal only the last would be saved, and so be the best."""
    monkeypatch.chdir(tmp_path)
    step = Run._sample_and_update

    async def signalled(self: Run, index: int) -> None:
        if index == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        await step(self, index)

    command = ["train", f"model={tiny_model_folder}", *SETTINGS, "eval.every=1"]
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_sample_and_update", signalled)
        assert main(command) == 143
    (state,) = (tmp_path / "outputs").glob("*/*/checkpoints/step-000001/state.json")
    assert json.loads(state.read_text())["best"] is None


class Ring:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.usefixtures("nothing_is_frozen")
def test_old_objects_are_frozen_and_new_garbage_is_found() -> None:
    old = Ring()
    old_seen = weakref.ref(old)
    with freeze_garbage():
        assert gc.get_freeze_count() > 10_000
        del old
        new = weakref.ref(Ring())
        gc.collect()
        assert new() is None
        assert old_seen() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old_seen() is None


@pytest.mark.usefixtures("nothing_is_frozen")
def test_objects_of_the_first_step_are_frozen_too() -> None:
    with freeze_garbage():
        garbage, kept = weakref.ref(Ring()), Ring()
        seen = weakref.ref(kept)
        freeze_more()
        assert garbage() is None  # collected before the rest was frozen
        del kept
        gc.collect()
        assert seen() is not None
    gc.collect()
    assert seen() is None and gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_is_frozen")
def test_unfrozen_after_an_error() -> None:
    with pytest.raises(KeyboardInterrupt), freeze_garbage():
        raise KeyboardInterrupt
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_is_frozen")
def test_objects_frozen_by_the_caller_stay_frozen() -> None:
    with freeze_garbage():
        with freeze_garbage():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
