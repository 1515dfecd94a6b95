"""The public surface."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import covey
from covey.algorithms import algorithm_schemas
from covey.app import objects
from covey.config import compose


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_public_name_exists() -> None:
    for name in covey.__all__:
        assert getattr(covey, name) is not None


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = covey.nothing


SMALL = {
    "data": {"train_batch_size": 2},
    "rollout": {"group_size": 4, "max_tokens": 5},
    "loop": {"total_steps": 2, "save_final": False},
    "learner.lr": 1e-3,
}


def test_train_on_a_list_with_a_function(tiny_model_folder: Path) -> None:
    @covey.reward
    def vowels(final_answer: str, answer: str) -> float:
        return sum(letter in "aeiou" for letter in final_answer) / (1 + len(answer))

    tasks = [{"question": f"say it, {i}", "answer": "x"} for i in range(4)]
    run = covey.train(
        model=str(tiny_model_folder), tasks=tasks, reward=vowels, algorithm="grpo", validation=tasks[:2], **SMALL
    )
    assert [step for step, _ in run.evaluations] == [0, 2]
    assert "eval/greedy/vowels" in run.evaluations[-1][1]
    assert (run.path / "summary.md").is_file()


def test_train_on_a_generated_task_and_on_task_objects(tiny_model_folder: Path) -> None:
    covey.train(model=str(tiny_model_folder), tasks="countdown", **(SMALL | {"data.val_size": 2}))
    made = [covey.Task(str(i), ({"role": "user", "content": "hm"},), answer="a") for i in range(2)]
    run = covey.train(model=str(tiny_model_folder), tasks=made, reward="exact", **SMALL)
    assert run.evaluations == []


def test_train_where_an_event_loop_runs_already(tiny_model_folder: Path) -> None:
    """As in a notebook."""

    async def cell() -> int:
        run = covey.train(model=str(tiny_model_folder), tasks=[{"question": "q", "answer": "a"}], **SMALL)
        return run.total_steps

    assert asyncio.run(cell()) == 2


def test_mistakes_in_the_call(tiny_model_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"tasks, row 2: no column question"):
        covey.train(model=str(tiny_model_folder), tasks=[{"question": "a"}, {"qestion": "b"}])
    with pytest.raises(ValueError, match="tasks has no rows"):
        covey.train(model=str(tiny_model_folder), tasks=[])
    with pytest.raises(ValueError, match="no such file"):
        covey.train(model=str(tiny_model_folder), tasks="nowhere.jsonl")


@pytest.mark.parametrize(
    "text",
    [
        r"end with \boxed{N}",
        "use ${x} and $y",
        r"\${x} and \\${y}",
        "it's 'quoted' \\",
        "two\nlines, a=b, [c]",
        "null",
        "1e-5",
    ],
)
def test_text_from_python_stays_as_it_is(text: str) -> None:
    words = objects._settings({"data": {"system_prompt": text}, "rollout.stop": [text]})
    config = compose(words, algorithms=algorithm_schemas()).config
    assert config.data.system_prompt == text
    assert config.rollout.stop == [text]


def test_a_list_of_tasks_with_a_file_to_evaluate_on_and_a_system_prompt(tiny_model_folder: Path) -> None:
    Path("test.jsonl").write_text('{"question": "say b", "answer": "b"}\n{"question": "say c", "answer": "c"}\n')
    tasks = [{"question": f"say {i}", "answer": str(i)} for i in range(4)]
    settings = SMALL | {"data.system_prompt": r"in a \box"}
    run = covey.train(model=str(tiny_model_folder), tasks=tasks, reward="exact", validation="test.jsonl", **settings)
    assert [step for step, _ in run.evaluations] == [0, 2]
    assert run.evaluator is not None and len(run.evaluator.tasks) == 2
    for task in run.evaluator.tasks:
        assert task.messages[0] == {"role": "system", "content": r"in a \box"}
    episode = json.loads((run.path / "episodes.jsonl").read_text().splitlines()[0])
    assert "in a" in json.dumps(episode)
