"""Sweeps as jobs, through submitit's executor of this machine."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from covey.app.sweep import read_options, submit, train_one
from covey.cli.main import main
from covey.errors import InputError
from covey.imports import install_extra

SMALL = [
    *("data=sort", "algorithm=grpo", "data.train_size=4", "data.val_size=1", "data.train_batch_size=2"),
    *("rollout.group_size=2", "rollout.max_tokens=2", "loop.total_steps=1", "loop.save_final=false"),
    *("eval.before=false", "eval.after=false", "logging.to=[]", "resume=disable", "loop.threads=1"),
]


def test_options_are_numbers_where_they_are_some() -> None:
    assert read_options("timeout_min=240,slurm_partition=gpu") == {"timeout_min": 240, "slurm_partition": "gpu"}
    assert read_options(None) == {}
    with pytest.raises(InputError, match="key=value"):
        read_options("timeout")


def test_an_unknown_launcher_is_named() -> None:
    with pytest.raises(InputError, match="did you mean   submitit"):
        submit("submitti", [], Path(), {}, {})


def test_a_launcher_is_for_sweeps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--launcher", "submitit"]) == 2
    assert "add --multirun" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("submitit") is not None, reason="submitit is here")
def test_without_the_package_the_fix_is_told(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--multirun", "--launcher", "submitit", f"model={tiny_model_folder}", *SMALL]
    assert main(["train", *words]) == 2
    assert install_extra("slurm") in capsys.readouterr().err


def test_a_job_that_is_queued_again_goes_on_in_its_folder(tmp_path: Path, tiny_model_folder: Path) -> None:
    """From its last checkpoint; anew where it was ended before the first."""
    place = tmp_path / "multirun" / "0"

    def steps() -> list[int]:
        rows = map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
        return [row["step"] for row in rows if row["kind"] == "step"]

    two = [f"model={tiny_model_folder}", *SMALL, "loop.total_steps=2"]
    train_one({}, two, str(place))
    assert not list(place.glob("checkpoints/step-*"))
    train_one({}, two, str(place))
    assert steps() == [0, 1]
    ended = [*two, "loop.save_every=1", "loop.max_minutes=1e-6"]
    for expected in ([0], [0, 1]):
        train_one({}, ended, str(place))
        assert steps() == expected
    with pytest.raises(InputError, match="other settings"):
        train_one({}, [*ended, "learner.lr=0.5"], str(place))


@pytest.mark.slow
def test_every_combination_is_a_job_of_its_own(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("submitit")
    monkeypatch.chdir(tmp_path)
    words = ["--multirun", "--launcher", "submitit", "--launcher-options", "cluster=local", "learner.lr=1e-5,2e-5"]
    assert main(["train", *words, f"model={tiny_model_folder}", *SMALL]) == 0
    told = capsys.readouterr().out
    assert "[1/2] job " in told and "[2/2] job " in told
    runs = [tmp_path / path for path in sorted(Path().glob("multirun/*/*/[01]"))]
    assert [json.loads((run / "run.json").read_text())["status"] for run in runs] == ["finished", "finished"]
    rates = [json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["metrics"]["optim/lr"] for run in runs]
    assert rates == [1e-5, 2e-5]
