"""Rewards as the command line and the API run them: in workers, with options, and nothing left afterwards."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.cli.main import main
from tests.cli.test_train import SMALL, the_run

SCORE_KEYS = """
import os, time

def scaled(final_answer, factor=1.0, slow=""):
    if set(slow) & set(final_answer):
        time.sleep(60)
    return {"reward": factor * len(final_answer), "pid": os.getpid()}

def dies():
    os._exit(3)

def ranked(episodes, best=1.0):
    return [best * place for place, _ in enumerate(episodes)]
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scores.py").write_text(SCORE_KEYS)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Any:
    before = children()
    yield
    assert children() <= before


def children() -> set[str]:
    if sys.platform != "linux":
        return set()
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()}


def metrics(kind: str = "step") -> list[dict[str, float]]:
    lines = map(json.loads, (the_run() / "metrics.jsonl").read_text().splitlines())
    return [line["metrics"] for line in lines if line["kind"] == kind]


def test_a_users_reward_has_options_and_a_process_of_its_own(tiny_model_folder: Path) -> None:
    words = ["reward=scores.py:scaled", "reward.options.scaled.factor=0", "eval.before=false"]
    assert main(["train", f"model={tiny_model_folder}", *words, *SMALL]) == 0
    for step in metrics():
        assert step["reward/scaled/mean"] == step["reward/scaled/max"] == 0.0
        assert step["reward/scaled/pid/min"] != os.getpid()
    config = (the_run() / "config.yaml").read_text()
    assert "factor: 0" in config


def test_a_reward_that_hangs_on_some_answers_costs_those(
    tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reward=scores.py:scaled", "reward.options.scaled.slow=abcdef", "reward.seconds=0.4", "loop.total_steps=1"]
    words += ["eval.before=false", "eval.after=false", "rollout.group_size=8", "rollout.max_tokens=12"]
    started = time.monotonic()
    assert main(["train", f"model={tiny_model_folder}", *SMALL, *words]) == 0
    assert time.monotonic() - started < 50
    (step,) = metrics()
    assert 0 < step["episodes/failed/reward_timeout"] == step["episodes/failed"] < 16
    assert "it took longer than reward.seconds=0.4" in capsys.readouterr().out


def test_a_reward_that_always_dies_ends_the_run_and_says_why(
    tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reward=scores.py:dies", "eval.before=false"]
    assert main(["train", f"model={tiny_model_folder}", *words, *SMALL]) != 0
    told = capsys.readouterr().err
    assert "8 × reward_crash: reward dies on task" in told and "exit code 3" in told


def test_group_rewards_with_options(tiny_model_folder: Path) -> None:
    words = ["reward=scores.py:ranked", "reward.options.ranked.best=2", "eval.before=false", "eval.after=false"]
    assert main(["train", f"model={tiny_model_folder}", *words, *SMALL]) == 0
    assert metrics()[0]["reward/ranked/max"] == 6.0


def test_eval_and_sample_score_in_workers(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(tiny_model_folder), "data=sort", "data.val_size=3", "rollout.max_tokens=5", "reward=scores.py:scaled"]
    assert main(["eval", *words, "reward.options.scaled.factor=0", "--json", "out.json"]) == 0
    found = json.loads(Path("out.json").read_text())
    assert found["eval/greedy/scaled"] == 0.0 and found["eval/greedy/scaled/pid"] != os.getpid()
    capsys.readouterr()
    assert main(["sample", *words, "reward.options.scaled.factor=0", "-n", "2", "--tasks", "1"]) == 0
    assert capsys.readouterr().out.count("scaled=0 ") == 2


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("reward.options.scaled.facto=2", "unknown option of reward scaled  facto\n  did you mean   factor?"),
        ("reward.options.scald.factor=2", "unknown reward in reward.options  scald\n  did you mean   scaled?"),
    ],
)
def test_mistakes_stop_before_the_model_loads(
    tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], word: str, told: str
) -> None:
    assert main(["train", f"model={tiny_model_folder}", "reward=scores.py:scaled", word, *SMALL]) != 0
    assert told in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_a_judges_settings_are_checked_before(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reward=judge", "reward.options.judge.url=http://x/v1", "reward.options.judge.model=m"]
    words += ["reward.options.judge.api_key_env=NO_SUCH_KEY_HERE", f"model={tiny_model_folder}"]
    assert main(["train", *words, "--validate-only"]) == 0
    assert "not on this machine: reward.options.judge.api_key_env=NO_SUCH_KEY_HERE" in capsys.readouterr().out
    assert main(["train", *words, "--validate-only", "--strict"]) != 0


def test_the_api_takes_closures_and_options(tiny_model_folder: Path) -> None:
    seen: list[str] = []

    def mine(final_answer: str, factor: float = 1.0) -> dict[str, float]:
        seen.append(final_answer)
        return {"reward": factor * len(final_answer), "pid": os.getpid()}

    run = covey.train(
        str(tiny_model_folder),
        [{"question": f"q{i}", "answer": "x"} for i in range(2)],
        mine,
        "grpo",
        data={"train_batch_size": 2},
        rollout={"group_size": 2, "max_tokens": 3},
        loop={"total_steps": 1, "save_final": False},
        **{"reward.options": {"mine": {"factor": 0}}},
    )
    (step,) = metrics()
    assert step["reward/mine/max"] == 0.0 and step["reward/mine/pid/min"] != os.getpid()
    assert seen == []  # it happened elsewhere
    run.resources.close()  # again: nothing is left to close


def test_a_run_that_cannot_be_built_leaves_nothing(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from covey.app import build

    def broken(*_: Any) -> Any:
        assert children()
        raise MemoryError

    monkeypatch.setattr(build, "make_learner", broken)
    with pytest.raises(MemoryError):
        main(["train", f"model={tiny_model_folder}", "reward=scores.py:scaled", *SMALL])
