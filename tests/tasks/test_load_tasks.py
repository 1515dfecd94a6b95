"""The order of tasks, and the default reward."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.cli.main import main
from covey.config.schema import DataConfig
from covey.errors import InputError
from covey.tasks import batch_for_step, load_tasks, steps_per_epoch
from covey.tasks.load import MARKED
from covey.types import Task

# -- Order -------------------------------------------------------------------------------------------------------------


SIZES = [(1, 1), (1, 4), (3, 4), (4, 4), (5, 4), (8, 4), (11, 4), (12, 1)]


def tasks(count: int) -> list[Task]:
    return [Task(str(i), ()) for i in range(count)]


def ids(count: int, step: int, size: int, seed: int = 0, shuffle: bool = True) -> list[str]:
    return [task.id for task in batch_for_step(tasks(count), step, size, seed=seed, shuffle=shuffle)[1]]


@pytest.mark.parametrize(("count", "size", "expected"), [(1, 4, 1), (4, 4, 1), (7, 4, 1), (8, 4, 2), (11, 4, 2)])
def test_steps_per_epoch(count: int, size: int, expected: int) -> None:
    assert steps_per_epoch(count, size) == expected


def test_without_shuffling_tasks_are_in_order_and_the_incomplete_batch_is_dropped() -> None:
    batches = [batch_for_step(tasks(5), step, 2, seed=0, shuffle=False) for step in range(4)]
    assert [(epoch, [task.id for task in batch]) for epoch, batch in batches] == [
        (0, ["0", "1"]),
        (0, ["2", "3"]),
        (1, ["0", "1"]),
        (1, ["2", "3"]),
    ]


def test_a_short_batch_is_kept_if_it_is_the_only_one() -> None:
    assert sorted(ids(3, step=5, size=4)) == ["0", "1", "2"]


@pytest.mark.parametrize(("count", "size"), SIZES)
@pytest.mark.parametrize("seed", [0, 1, 17])
def test_an_epoch_repeats_no_task_and_drops_only_the_incomplete_batch(count: int, size: int, seed: int) -> None:
    steps = steps_per_epoch(count, size)
    for epoch in range(3):
        batches = [batch_for_step(tasks(count), epoch * steps + k, size, seed=seed, shuffle=True) for k in range(steps)]
        seen = [task.id for _, batch in batches for task in batch]
        assert {result for result, _ in batches} == {epoch}
        assert len(seen) == len(set(seen)) == (count if count < size else count - count % size)


def test_order_depends_on_seed_and_epoch_alone() -> None:
    assert ids(50, step=0, size=50) == ids(50, step=0, size=50)
    assert ids(50, step=0, size=50) == ids(50, step=0, size=25) + ids(50, step=1, size=25)
    assert ids(50, step=0, size=50) != ids(50, step=1, size=50)
    assert ids(50, step=0, size=50) != ids(50, step=0, size=50, seed=1)


def test_every_task_is_equally_likely_to_come_first() -> None:
    firsts = [ids(4, step=epoch, size=4)[0] for epoch in range(4000)]
    # 1000 each, standard deviation √(4000 · ¼ · ¾) ≈ 27
    assert all(abs(firsts.count(str(i)) - 1000) < 5 * 27 for i in range(4))


def test_no_tasks() -> None:
    with pytest.raises(InputError, match="there are no training tasks"):
        batch_for_step([], 0, 4, seed=0, shuffle=True)


# -- The default reward ------------------------------------------------------------------------------------------------


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


def test_files_with_marked_answers_use_math_verify(tmp_path: Path) -> None:
    assert load_tasks(DataConfig(train_files=write(tmp_path, GSM8K)), 0).reward == "math_verify"
    assert load_tasks(DataConfig(train_files=write(tmp_path, PLAIN)), 0).reward is None
    most = load_tasks(DataConfig(train_files=write(tmp_path, [*GSM8K[:4], *PLAIN[:3]])), 0)
    few = load_tasks(DataConfig(train_files=write(tmp_path, [*GSM8K[:3], *PLAIN[3:]])), 0)
    assert (most.reward, few.reward) == ("math_verify", None)


@pytest.mark.parametrize("recipe", ["gvpo_math", "grpo_gsm8k"])
def test_a_recipes_reward_applies_to_user_files(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write(tmp_path, PLAIN)
    words = ["--config-name", recipe, "data.train_files=rows.jsonl", "data.val_files=rows.jsonl"]
    assert main(["train", *words, "--validate-only"]) == 0
    assert "reward     math_verify × 1" in capsys.readouterr().out


def test_the_first_line_names_the_reward(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    covey.train(model=str(tiny_model_folder), tasks=GSM8K, **SMALL, **{"loop.total_steps": 1})
    lines = capsys.readouterr().out.splitlines()
    first = next(line for line in lines if not line.startswith("loading "))  # on a busy machine
    assert "on tasks given in Python, reward math_verify, 1 steps" in first


def test_first_steps_without_signal_warn_once(
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
