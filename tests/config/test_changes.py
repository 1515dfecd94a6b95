"""Which settings of two runs differ, and what that means for a continuation."""

from __future__ import annotations

from typing import Any

import pytest

from covey.algorithms import algorithm_schemas
from covey.config import Composed, compose
from covey.config.validate import Change, differences
from covey.redact import MASK


def composed(*words: str) -> Composed:
    return compose(words, algorithms=algorithm_schemas())


def found(old: dict[str, Any], new: Composed) -> dict[str, tuple[Any, Any]]:
    return {change.key: (change.old, change.new) for change in differences(old, new.tree, new.config)}


def test_every_value_that_differs_is_found_by_its_key() -> None:
    old = composed("data.options.count=3", "model.lora.rank=2", "resume=runs/a")
    new = composed("data.options.digits=2", "reward=[exact,format]", "resume=disable")
    assert found(old.tree, new) == {
        "data.options.count": (3, "(not set)"),
        "data.options.digits": ("(not set)", 2),
        "model.lora.rank": (2, 0),
        "reward.name": ("auto", ["exact", "format"]),
    }
    assert found(new.tree, new) == {}


def test_a_setting_that_is_newer_than_the_run_differs_only_from_its_default() -> None:
    old = composed().tree
    old = old | {"rollout": {key: value for key, value in old["rollout"].items() if key != "min_p"}}
    assert found(old, composed()) == {}
    assert found(old, composed("rollout.min_p=0.1")) == {"rollout.min_p": ("(not set)", 0.1)}


def test_a_hidden_secret_is_no_difference() -> None:
    old, new = composed("reward.options.judge.api_key=abcdefgh").tree, composed("reward.options.judge.api_key=ijklmnop")
    old["reward"]["options"]["judge"]["api_key"] = MASK
    assert found(old, new) == {}


def test_another_algorithm_is_named_without_what_only_one_of_them_has() -> None:
    old = composed("algorithm=gvpo", "algorithm.beta=0.3")
    assert found(old.tree, composed("algorithm=grpo")).keys() >= {"algorithm.name"}
    assert not any("(not set)" in values for values in found(old.tree, composed("algorithm=grpo")).values())


@pytest.mark.parametrize(
    ("key", "effect"),
    [
        *(("loop.total_steps", "free"), ("eval.n", "free"), ("learner.lr", "free"), ("validation tasks", "free")),
        *(("learner.lr_scale", "training"), ("rollout.temperature", "training"), ("rewards", "training")),
        *(("seed", "training"), ("training tasks", "training"), ("model.name", "training")),
        *(("model.lora.rank", "fixed"), ("model.lora.target_modules", "fixed")),
    ],
)
def test_what_a_change_means(key: str, effect: str) -> None:
    assert Change(key, 1, 2).effect == effect


def test_a_change_in_words() -> None:
    assert str(Change("learner.lr", 1e-5, 2e-5)) == "learner.lr: 1e-05 → 2e-05"
    assert str(Change("data.val_files", None, ["a.jsonl"])) == 'data.val_files: null → ["a.jsonl"]'
    assert len(str(Change("data.system_prompt", "x" * 500, "y"))) < 120
