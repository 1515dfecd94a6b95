"""Tasks of the package reasoning-gym, and its scorers."""

from __future__ import annotations

import importlib.util
import pickle
import re
from typing import Any

import pytest

from covey.config.schema import DataConfig
from covey.errors import Absent, InputError
from covey.imports import install_extra
from covey.rewards.generated import reasoning_gym
from covey.tasks import TaskSet, default_reward, load_tasks
from covey.types import Task

INSTALLED = importlib.util.find_spec("reasoning_gym") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="reasoning-gym is not installed: covey[reasoning-gym]")


def load(seed: int = 0, sizes: tuple[int, int] = (20, 10), **options: Any) -> TaskSet:
    data = DataConfig(name="reasoning_gym", options=options, train_size=sizes[0], val_size=sizes[1])
    return load_tasks(data, seed)


def score(task: Task, reply: str) -> dict[str, float]:
    return reasoning_gym(reply, **task.columns)


def test_it_names_its_reward() -> None:
    assert default_reward(DataConfig(name="reasoning_gym")) == "reasoning_gym"


@pytest.mark.skipif(INSTALLED, reason="reasoning-gym is installed")
def test_without_the_package() -> None:
    with pytest.raises(Absent, match=re.escape(install_extra("reasoning-gym"))):
        load(dataset="leg_counting")


@needs_package
def test_problems_and_their_scorer() -> None:
    tasks = load(dataset="leg_counting", max_animals=4)
    assert (len(tasks.train), len(tasks.validation), tasks.reward) == (20, 10, "reasoning_gym")
    for task in tasks.train[:5]:
        assert score(task, f"<think>hm</think> <answer>{task.answer}</answer>")["reward"] == 1.0
        assert score(task, f"<answer>{int(task.answer) + 1}</answer>")["reward"] == 0.0
    pickle.dumps(tasks.train[0].columns)  # the reward runs in a worker


@needs_package
def test_training_and_validation_use_separate_streams() -> None:
    def asked(tasks: tuple[Task, ...]) -> set[Any]:
        return {task.messages[0]["content"] for task in tasks}

    first, again, other = (
        load(0, dataset="leg_counting"),
        load(0, dataset="leg_counting"),
        load(1, dataset="leg_counting"),
    )
    assert first.train == again.train
    assert first.validation == other.validation
    assert not asked(first.train) & asked(other.train)
    small = load(0, (500, 500), dataset="chain_sum", max_terms=2, max_digits=1)
    assert not asked(small.train) & asked(small.validation)


@needs_package
def test_an_answer_that_the_scorer_cannot_parse() -> None:
    task = load(dataset="prime_factorization").train[0]
    assert score(task, "no idea") == {"reward": 0.0, "unread": 1.0}


@needs_package
def test_several_families_at_once() -> None:
    parts = [{"name": "leg_counting"}, {"name": "chain_sum", "weight": 2.0, "config": {"max_terms": 2}}]
    tasks = load(dataset="composite", datasets=parts)
    assert {task.columns["entry"]["metadata"]["source_dataset"] for task in tasks.train} == {
        "leg_counting",
        "chain_sum",
    }
    assert all(score(task, f"<answer>{task.answer}</answer>")["reward"] == 1.0 for task in tasks.train)


@needs_package
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "which of its data sets"),
        ({"dataset": "leg_countin"}, "did you mean   leg_counting"),
        ({"dataset": "leg_counting", "min_animals": -1}, "refuses these options of leg_counting: min_animals"),
        ({"dataset": "leg_counting", "legs": 3}, "refuses these options of leg_counting"),
        ({"dataset": "leg_counting", "size": 3}, "use data.train_size"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(**options)
