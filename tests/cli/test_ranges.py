"""Values out of range end every command before anything is loaded, written or allocated."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import covey
from covey.cli.main import main

# Setting and values → what the range is called.
OUTSIDE = {
    "learner.lr=nan": "a number from 0 to 10, got nan",
    "learner.lr=inf": "a number from 0 to 10, got inf",
    "learner.lr=1e400": "a number from 0 to 10, got inf",
    "rollout.temperature=nan": "a number from 0.001 to 100, got nan",
    "learner.beta1=2": "a number at least 0 and below 1, got 2.0",
    "learner.eps=-1": "a number above 0 and at most 1, got -1.0",
    "learner.weight_decay=-1": "a number from 0 to 100, got -1.0",
    "learner.weight_decay=nan": "a number from 0 to 100, got nan",
    "learner.grad_clip=nan": "a number from 0 to 1e+30, got nan",
    "algorithm.kl_coef=nan": "a number from 0 to 1,000,000, got nan",
    "reward.seconds=nan": "a number from 0.001 to 1,000,000, got nan",
    "model.lora.rank=-1": "a whole number from 0 to 4,096, got -1",
    "model.lora.rank=1000000": "a whole number from 0 to 4,096, got 1000000",
    "rollout.stop=['']": "text of 1 to 1,000 characters in every entry, got ['']",
    "rollout.group_size=99999999999999999999": "a whole number from 1 to 65,536, got 99999999999999999999",
    "cluster.learner_devices=0": "a whole number from 1 to 100,000, got 0",
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("word", OUTSIDE)
def test_a_value_out_of_range_is_refused(
    word: str, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", f"model={tiny_model_folder}", "algorithm=grpo", word, "--validate-only"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"{word.partition('=')[0]} must be {OUTSIDE[word]}"
    assert lines[-1] == "nothing was started"
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        ["train"],
        ["train", "--dry-run"],
        ["train", "--multirun", "seed=1,2"],
        ["sft", "data=calculator"],
        ["eval", "smollm2-135m"],
        ["sample", "smollm2-135m", "--question", "why?"],
        ["config"],
    ],
    ids=" ".join,
)
def test_every_command_refuses_it(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "optimizer.lr=nan", "eval.top_p=0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "optimizer.lr must be a number from 0 to 10, got nan  (= learner.lr)" in lines
    assert "eval.top_p must be a number above 0 and at most 1, got 0.0" in lines
    assert list(Path().iterdir()) == []


def test_a_sweep_is_refused_before_its_first_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["learner.lr=1e-5,nan,-1", "rollout.temperature=1.0,inf"]
    assert main(["train", "--multirun", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    named = [line for line in lines if " must be " in line]
    assert named == [
        "rollout.temperature must be a number from 0.001 to 100, got inf",
        "learner.lr must be a number from 0 to 10, got nan",
        "learner.lr must be a number from 0 to 10, got -1.0",
    ]
    assert list(Path().iterdir()) == []


def test_flags_that_are_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "smollm2-135m", "--n", "99999999999999999999"]) == 2
    assert "eval.n must be a whole number from 1 to 65,536, got 99999999999999999999" in capsys.readouterr().err
    for text in ("0", "65537", "9" * 5000, "²", "many"):
        assert main(["sample", "smollm2-135m", "-n", text]) == 2
        assert capsys.readouterr().err.startswith("-n must be a whole number from 1 to 65,536, got ")


def test_from_python() -> None:
    with pytest.raises(ValueError) as error:
        covey.train(learner={"lr": math.nan, "eps": -math.inf}, **{"rollout.group_size": 10**30})
    assert [line for line in str(error.value).splitlines() if " must be " in line] == [
        f"rollout.group_size must be a whole number from 1 to 65,536, got {10**30}",
        "learner.lr must be a number from 0 to 10, got nan",
        "learner.eps must be a number above 0 and at most 1, got -inf",
    ]
    rewards = torch.tensor([0.0, 1.0])
    with pytest.raises(ValueError, match=r"^algorithm\.epsilon must be a number from 0 to 1,000, got nan"):
        covey.advantages("grpo", rewards, [0, 0], epsilon=math.nan)
