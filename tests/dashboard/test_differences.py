"""Differing settings of runs, and names made of them."""

from __future__ import annotations

from typing import Any

import pytest

from covey.dashboard.differences import MISSING, differing_settings, format_setting, run_names

BASE = {"algorithm.name": "grpo", "model.name": "tiny", "data.name": "sort", "learner.lr": 1e-6, "seed": 0}


def names(*changes: dict[str, Any], experiments: list[str] | None = None) -> list[str]:
    configs = [BASE | change for change in changes]
    algorithms = [config["algorithm.name"] for config in configs]
    return run_names(configs, algorithms, experiments or ["run"] * len(configs))


def test_names_contain_the_differing_settings() -> None:
    sweep = [{"learner.lr": lr, "seed": seed} for lr in (1e-6, 1e-5) for seed in (1, 2)]
    assert names(*sweep) == ["grpo lr=1e-6 seed=1", "grpo lr=1e-6 seed=2", "grpo lr=1e-5 seed=1", "grpo lr=1e-5 seed=2"]
    assert names(sweep[0]) == ["grpo"], "nothing to tell it from"
    assert names({"data.val_size": 10}, {"data.val_size": 20, "seed": 1}) == ["grpo seed=0", "grpo seed=1"]


def test_equal_names_are_numbered() -> None:
    assert names({}, {}, {"seed": 1}, {}) == ["grpo seed=0", "grpo seed=0 #2", "grpo seed=1", "grpo seed=0 #3"]


def test_settings_of_an_algorithm_are_compared_between_its_own_runs() -> None:
    found = names(
        {"algorithm.clip_low": 0.2, "algorithm.loss": "ppo"},
        {"algorithm.name": "gvpo", "algorithm.beta": 0.1, "algorithm.loss": "gvpo"},
        {"algorithm.name": "gvpo", "algorithm.beta": 0.2, "algorithm.loss": "gvpo"},
    )
    assert found == ["grpo", "gvpo beta=0.1", "gvpo beta=0.2"]


def test_settings_with_the_same_last_word_have_full_names() -> None:
    assert names({"critic.lr": 1e-5}, {"learner.lr": 1e-5, "critic.lr": 2e-5}) == [
        "grpo learner.lr=1e-6 critic.lr=1e-5",
        "grpo learner.lr=1e-5 critic.lr=2e-5",
    ]


def test_of_many_differences_names_contain_the_distinguishing_ones() -> None:
    """Six settings vary together: one of them distinguishes the runs."""
    many = ("rollout.top_p", "rollout.min_p", "learner.eps", "learner.beta1", "learner.beta2")
    assert names(*({"learner.lr": n * 1e-6} | dict.fromkeys(many, n / 10) for n in (1, 2, 3))) == [
        "grpo lr=1e-6",
        "grpo lr=2e-6",
        "grpo lr=3e-6",
    ]


def test_important_settings_come_first() -> None:
    many = {"loop.total_steps": 20, "data.train_batch_size": 4, "learner.eps": 1e-6, "rollout.top_p": 0.9}
    assert names(many | {"mode.name": "async"}, {"mode.name": "sync"}) == ["grpo mode=async", "grpo mode=sync"]


def test_the_users_own_name_of_an_experiment_comes_first() -> None:
    assert names({}, {"seed": 1}, experiments=["run", "ablation"]) == ["grpo seed=0", "ablation grpo seed=1"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-5, "1e-5"), (0.0001, "1e-4"), (0.00012, "1.2e-4"), (0.05, "0.05"), (0.0, "0"), (1e20, "1e20"), (3.0, "3"),
     (True, "true"), (None, "none"), (8, "8"),
     (["a", "b"], "a+b"), ([], "none"), ("Answer  with\none word only, please", "Answer with one word on…")],
)  # fmt: skip
def test_values_are_short(value: Any, text: str) -> None:
    assert format_setting(value) == text


def test_only_settings_that_change_the_training_are_listed() -> None:
    one = BASE | {
        "logging.output_dir": "outputs", "logging.experiment": "a", "logging.tags": [], "resume": "auto",
        "gateway.port": 9999, "loop.threads": 2, "loop.save_every": 0, "cluster.address": None, "rollout.group_size": 8,
        "learner.lr": 0.1 + 0.2, "reward.weights": {}, "data.train_files": "/home/me/data/train.jsonl",
    }  # fmt: skip
    other = BASE | {
        "logging.output_dir": "/tmp/o", "logging.experiment": "b", "logging.tags": ["x"], "resume": "disable",
        "gateway.port": 1, "loop.threads": 8, "loop.save_every": 10, "cluster.address": "a", "rollout.group_size": 16,
        "learner.lr": 0.3, "reward.weights.exact": 1.0, "data.train_files": "data/train.jsonl",
    }  # fmt: skip
    assert differing_settings([one, other]) == {"rollout.group_size": [8, 16], "reward.weights.exact": [MISSING, 1.0]}


def test_paths_are_shown_from_where_they_differ() -> None:
    files = ["/data/a/train.jsonl", "/data/b/train.jsonl", "b/train.jsonl"]
    found = differing_settings([BASE | {"data.train_files": [file]} for file in files])
    assert found["data.train_files"] == [["a/train.jsonl"], ["b/train.jsonl"], ["b/train.jsonl"]]
    models = ["/x/outputs/run/checkpoints/step-10/model", "/x/outputs/run/checkpoints/step-20/model", "tiny"]
    found = differing_settings([BASE | {"model.name": model} for model in models])
    assert found["model.name"] == ["step-10/model", "step-20/model", "tiny"]


def test_a_setting_that_an_older_run_does_not_have_counts_as_its_default() -> None:
    assert differing_settings([BASE, BASE | {"rollout.temperature": 1.0}]) == {}
    assert differing_settings([BASE, BASE | {"rollout.temperature": 0.5}]) == {"rollout.temperature": [1.0, 0.5]}


def test_another_algorithm_is_listed_once() -> None:
    grpo = BASE | {"algorithm.loss": "ppo", "algorithm.clip_low": 0.2, "algorithm.kl_coef": 0.001}
    gvpo = BASE | {
        "algorithm.name": "gvpo",
        "algorithm.loss": "gvpo",
        "algorithm.beta": 0.1,
        "algorithm.kl_coef": 0.01,
    }
    assert differing_settings([grpo, gvpo]) == {
        "algorithm.name": ["grpo", "gvpo"],
        "algorithm.kl_coef": [0.001, 0.01],
    }
    assert list(differing_settings([grpo, gvpo, grpo | {"algorithm.loss": "sapo"}])) == [
        "algorithm.name",
        "algorithm.loss",
        "algorithm.kl_coef",
    ]
