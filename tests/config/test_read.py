"""Files, in the three shapes that people bring."""

from __future__ import annotations

import datetime

import pytest

from covey.config import read_yaml
from covey.config.read import load_yaml
from covey.errors import InputError

AGENTFLOW = """\
env:
  BASE_MODEL: 'Qwen/Qwen2.5-7B-Instruct'  # Your model
  N_GPUS: 1  # Number of GPUs
  DATA: ${HOME_OF_DATA}/math
  AGENT_MAX_TIMEOUT: 300

python_args:
  algorithm.gvpo_beta: 0.15  # KL penalty coefficient
  actor_rollout_ref.rollout.n: 8  # Samples per prompt
  actor_rollout_ref.actor.optim.lr: 1e-6
  data.train_batch_size: 32  # Batch size
  data.train_files: '${DATA}/train.parquet'
  actor_rollout_ref.model.path: ${BASE_MODEL}
  trainer.n_gpus_per_node: ${N_GPUS}
  trainer.total_epochs: 5  # Training epochs
"""


@pytest.fixture
def read(tmp_path):
    def read_text(text: str | bytes):
        path = tmp_path / "my.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_yaml(path)

    return read_text


def test_a_file_with_variables_and_python_args(read, monkeypatch):
    monkeypatch.setenv("HOME_OF_DATA", "/data")
    assert read(AGENTFLOW) == [
        ("env.BASE_MODEL", "Qwen/Qwen2.5-7B-Instruct", 2),
        ("env.N_GPUS", "1", 3),
        ("env.DATA", "/data/math", 4),
        ("env.AGENT_MAX_TIMEOUT", "300", 5),
        ("algorithm.gvpo_beta", 0.15, 8),
        ("actor_rollout_ref.rollout.n", 8, 9),
        ("actor_rollout_ref.actor.optim.lr", 1e-6, 10),
        ("data.train_batch_size", 32, 11),
        ("data.train_files", "/data/math/train.parquet", 12),
        ("actor_rollout_ref.model.path", "Qwen/Qwen2.5-7B-Instruct", 13),
        ("trainer.n_gpus_per_node", 1, 14),
        ("trainer.total_epochs", 5, 15),
    ]


def test_such_a_file_configures_a_run(run, monkeypatch):
    monkeypatch.setenv("HOME_OF_DATA", "/data")
    composed = run("algorithm.gvpo_beta=0.05", file=AGENTFLOW)
    config = composed.config
    assert (config.algorithm.beta, config.learner.lr) == (0.05, 1e-6)
    assert (config.model.name, config.data.train_files) == ("Qwen/Qwen2.5-7B-Instruct", "/data/math/train.parquet")
    assert config.agent.max_seconds == 300.0
    assert composed.env == {
        "BASE_MODEL": "Qwen/Qwen2.5-7B-Instruct",
        "N_GPUS": "1",
        "DATA": "/data/math",
        "AGENT_MAX_TIMEOUT": "300",
    }
    assert composed.warnings == ()


def test_a_model_that_is_only_a_variable_is_warned_about(run):
    composed = run(file="env: {BASE_MODEL: a/b}\npython_args: {algorithm.gvpo_beta: 0.1}")
    assert composed.config.model.name == "smollm2-135m"
    assert "env.BASE_MODEL is not used by any setting" in composed.warnings[0]


def test_a_number_of_gpus_that_is_only_a_variable_is_warned_about(run):
    file = "env: {N_GPUS: 8}\npython_args: {algorithm.gvpo_beta: 0.1}"
    warnings = run(file=file).warnings
    assert any("env.N_GPUS is not used by any setting" in text for text in warnings)
    for used in ("trainer.n_gpus_per_node=2", "cluster.learner_devices=1", "train_model.num_devices=1"):
        assert not any("N_GPUS" in text for text in run(used, file=file).warnings)
    assert not any("N_GPUS" in text for text in run(file="env: {N_GPUS: 1}").warnings)


def test_the_files_variables_come_before_the_environments(read, monkeypatch):
    monkeypatch.setenv("RUN", "outside")
    assert read("a: ${RUN}\nenv: {RUN: inside}")[0] == ("a", "inside", 1)


def test_quotes_keep_a_number_text(read):
    assert read("env: {N: 8}\na: ${N}\nb: '${N}'\nc: [x, \"${N}0\"]")[1:] == [
        ("a", 8, 2),
        ("b", "8", 3),
        ("c", ["x", "80"], 4),
    ]


def test_nested_and_dotted_keys(read):
    text = (
        "learner:\n  lr: 1e-5\n  eps: 1.0e-8\noptimizer.weight_decay: 0\nrollout.stop: [a, b]\nmodel: {lora: {rank: 4}}"
    )
    assert read(text) == [
        ("learner.lr", 1e-5, 2),
        ("learner.eps", 1e-8, 3),
        ("optimizer.weight_decay", 0, 4),
        ("rollout.stop", ["a", "b"], 5),
        ("model.lora.rank", 4, 6),
    ]


def test_lower_case_keys_under_env_are_settings(run):
    composed = run(file="env:\n  dataset: sort\n  repeats: 4\n  WANDB_MODE: offline")
    assert (composed.config.data.name, composed.config.rollout.group_size) == ("sort", 4)
    assert composed.env == {"WANDB_MODE": "offline"}


def test_free_keys_keep_their_dots(run):
    assert run(file="reward:\n  weights: {'my.py:fn': 0.5}").config.reward.weights == {"my.py:fn": 0.5}


def test_anchors_and_empty_sections(read):
    assert read("a: &a {x: 1}\nb: {<<: *a, y: 2}\nlearner:\nenv:\n") == [("a.x", 1, 1), ("b.x", 1, 1), ("b.y", 2, 2)]
    assert read("") == []


def test_a_recipe_is_a_file_too(run):
    file = "defaults:\n  - schema\n  - override algorithm: grpo\n  - _self_\nalgorithm:\n  kl_coef: 0.5"
    assert run(file=file).config.algorithm.kl_coef == 0.5


def test_other_references_are_left_to_omegaconf(run):
    assert (
        run(file="rollout.n: 4\nlearner: {mini_batch_size: '${rollout.group_size}'}").config.learner.mini_batch_size
        == 4
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: 1\nb: ${NO_SUCH}", "my.yaml, line 2: the variable ${NO_SUCH} is not defined\n  define it under env:"),
        ("env: {A: '${NO_SUCH}'}", "my.yaml, line 1: the variable ${NO_SUCH} is not defined"),
        ("a: 1\nb: [1, 2", "my.yaml, line 2, column 9: not YAML (expected ',' or ']', but got '<stream end>')"),
        ("a: 1\nb: c: d", "my.yaml, line 2, column 5: not YAML (mapping values are not allowed here)"),
        ("a: !!python/object:os.system x", "my.yaml, line 1, column 4: not YAML (could not determine a constructor"),
        ("- a\n- b", "my.yaml, line 1: expected settings (key: value)"),
        ("learner:\n  lr: 1\nlearner.lr: 2", "my.yaml, line 3: learner.lr is already set in line 2"),
        (
            "defaults: [other, _self_]",
            "my.yaml, line 1: a file cannot build on the recipe other\n  give both: --config-name",
        ),
        (b"a: \xff", "my.yaml: not UTF-8 text"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(read, tmp_path, text, error):
    with pytest.raises(InputError) as caught:
        read(text)
    assert str(caught.value).startswith(f"{tmp_path}/{error}")


def test_a_missing_file(tmp_path):
    with pytest.raises(InputError, match=r"none.yaml: cannot be read \(No such file or directory\)"):
        read_yaml(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: 1\nlearner:\n  lrr: 1", "unknown setting  a\n"),
        ("seed: 1\nlearner:\n  lrr: 1", "line 3: unknown setting  learner.lrr\n  did you mean   learner.lr"),
        ("seed: 1\nlearner:\n  lr: abc", "line 3: learner.lr must be a number from 0 to 10, got 'abc'"),
        (
            "algorithm: grpo\nalgorithm.beta: 1",
            "line 2: algorithm.beta is a setting of gvpo, dgdo and online_dpo, and the algorithm is grpo",
        ),
        ("learner.lr: 1\noptimizer.lr: 2", "optimizer.lr=2  ("),
        ("seed: 1\ncluster: slurm", "line 2: cluster=slurm)"),
    ],
)
def test_a_wrong_setting_is_told_with_its_line(run, text, error):
    with pytest.raises(InputError) as caught:
        run(file=text)
    assert "my.yaml, line" in str(caught.value)
    assert error in str(caught.value)


def test_notes_are_taken_as_they_are_written(run):
    sentence = "a first try: lr {1e-5}, it's [short]"
    assert run(f"logging.notes={sentence}").config.logging.notes == sentence
    assert run("logging.notes='quoted, too'").config.logging.notes == "quoted, too"


def test_a_file_that_is_nested_without_end_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("a: " + "[" * 100_000)
    with pytest.raises(InputError, match="levels deep"):
        load_yaml(path)
    path.write_text("lr: 1e-6\ntags: [a, b]\nwhen: 2026-01-31\n")
    assert load_yaml(path) == {"lr": 1e-6, "tags": ["a", "b"], "when": datetime.date(2026, 1, 31)}
