"""Which reward scores tasks where the user names none."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.cli.main import main
from covey.config.schema import DataConfig
from covey.tasks import load_tasks
from covey.tasks.load import MARKED

GSM8K = [{"question": f"Ann has {i} nuts and finds 2.", "answer": f"{i} + 2 = {i + 2}\n#### {i + 2}"} for i in range(6)]
PLAIN = [{"question": f"{i} + 2 ?", "answer": str(i + 2)} for i in range(6)]
SMALL = {"rollout.group_size": 4, "data.train_batch_size": 2, "rollout.max_tokens": 4, "loop.save_final": False}


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("16 - 3 = 13\n#### 13", True),
        ("#### 1,000\n", True),
        (r"so it is $\boxed{\frac{1}{2}}$.", True),
        (r"\boxed{5}", True),
        ("13", False),
        ("#### 13\nand more", False),
        (r"\boxed{5} is what one would think, and wrong", False),
        ("a heading\n####", False),
    ],
)
def test_the_end_of_a_worked_solution(answer: str, expected: bool) -> None:
    assert (MARKED.search(answer) is not None) == expected


def test_files_with_marked_answers_are_mathematics(tmp_path: Path) -> None:
    assert load_tasks(DataConfig(train_files=write(tmp_path, GSM8K)), 0).reward == "math_verify"
    assert load_tasks(DataConfig(train_files=write(tmp_path, PLAIN)), 0).reward is None
    most = load_tasks(DataConfig(train_files=write(tmp_path, [*GSM8K[:4], *PLAIN[:3]])), 0)
    few = load_tasks(DataConfig(train_files=write(tmp_path, [*GSM8K[:3], *PLAIN[3:]])), 0)
    assert (most.reward, few.reward) == ("math_verify", None)


@pytest.mark.parametrize("recipe", ["gvpo_math", "grpo_gsm8k"])
def test_the_reward_of_a_recipe_stays_with_files_of_ones_own(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write(tmp_path, PLAIN)
    words = ["--config-name", recipe, "data.train_files=rows.jsonl", "data.val_files=rows.jsonl"]
    assert main(["train", *words, "--validate-only"]) == 0
    assert "reward     math_verify × 1" in capsys.readouterr().out


def test_the_reward_in_force_stands_in_the_first_line(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    covey.train(model=str(tiny_model_folder), tasks=GSM8K, **SMALL, **{"loop.total_steps": 1})
    lines = capsys.readouterr().out.splitlines()
    first = next(line for line in lines if not line.startswith("loading "))  # on a busy machine
    assert "on tasks given in Python, reward math_verify, 1 steps" in first


def test_first_steps_without_signal_are_warned_of_once(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def constant(final_answer: str) -> float:
        return 0.0

    def lengths(episodes: list[Any]) -> list[float]:
        return [float(number) for number in range(len(episodes))]

    ends = {"rollout.stop": [*string.ascii_letters], "rollout.max_tokens": 32}  # otherwise being cut off is the cause
    small = SMALL | ends
    covey.train(model=str(tiny_model_folder), tasks=PLAIN, reward=constant, **small, **{"loop.total_steps": 4})
    out = capsys.readouterr().out.splitlines()
    (warning,) = [place for place, line in enumerate(out) if "no signal to learn from" in line]
    assert "in each of the first 3 steps" in out[warning] and "(constant, mean 0)" in out[warning]
    assert [line.split()[1] for line in out[:warning] if line.startswith("step")] == ["1/4", "2/4", "3/4"]
    covey.train(model=str(tiny_model_folder), tasks=PLAIN, reward=lengths, **small, **{"loop.total_steps": 3})
    assert "no signal" not in capsys.readouterr().out
