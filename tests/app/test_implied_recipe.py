"""Which recipe a command starts from where it names none."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.app.compose import ImpliedRecipe, implied_recipe
from covey.cli.main import main


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_DIR", raising=False)


def put(name: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text('[{"question": "1 + 1 ?", "answer": "2"}]')


@pytest.mark.parametrize(
    "words",
    [
        ["mode=sync"],
        ["mode=sync", "model.name=meta-llama/Llama-2-7b-hf"],
        ["mode=sync", "env.dataset=ifeval"],
        ["optimizer.lr=1e-4,1e-5", "policy.kl_coef=0.01,0.1"],
        ["mode=async", "train_model.num_devices=2", "loop.total_steps=2"],
        ["+train.epochs=2"],
    ],
)
def test_words_of_the_grpo_scripts_start_from_their_recipe(words: list[str]) -> None:
    found = implied_recipe(words, None)
    assert (found.recipe, found.settings) == ("grpo_gsm8k", ())
    assert "--config-name grpo_gsm8k" in found.note


@pytest.mark.parametrize(
    "words",
    [
        ["mode=async"],
        ["learner.lr=1e-5"],
        ["optimizer.lr=1e-5", "data=sort"],
        ["optimizer.lr=1e-5", "data.train_files=a.jsonl"],
        ["mode=sync", "algorithm=gvpo"],
        ["mode=sync", "agent=hf"],
        ["algorithm.adv_estimator=grpo", "trainer.nnodes=1", "data.train_files=a.json"],
        ["env.AGENT_MAX_TIMEOUT=500", "learner.lr=1e-5"],
    ],
)
def test_other_words_start_from_the_defaults(words: list[str]) -> None:
    assert implied_recipe(words, None) == ImpliedRecipe()


@pytest.mark.parametrize("words", [[], ["algorithm.gvpo_beta=0.15", "data.train_batch_size=16"]])
def test_the_folders_of_the_gvpo_guide_are_trained_on(words: list[str]) -> None:
    nothing = implied_recipe(words, None)
    assert nothing.recipe is None and "--config-name gvpo_math" in nothing.note
    put("data/train/combined_train.json")
    alone = implied_recipe(words, None)
    assert alone.recipe == "gvpo_math"
    assert alone.settings == ("data.train_files=[data/train/combined_train.json]", "eval.every=0")
    put("data/val/aime24.json")
    put("data/val/notes.txt")
    assert implied_recipe(words, None).settings == (
        "data.train_files=[data/train/combined_train.json]",
        "data.val_files=[data/val/aime24.json]",
    )
    assert implied_recipe([*words, "data=arithmetic"], None) == ImpliedRecipe()
    assert implied_recipe([*words, "algorithm=grpo"], None) == ImpliedRecipe()


def test_a_file_that_names_its_data_is_complete() -> None:
    put("data/train/a.json")
    Path("guide.yaml").write_text("python_args:\n  algorithm.gvpo_beta: 0.1\n")
    Path("whole.yaml").write_text("data:\n  train_files: a.jsonl\n")
    assert implied_recipe([], Path("guide.yaml")).recipe == "gvpo_math"
    assert implied_recipe([], Path("whole.yaml")) == ImpliedRecipe()


def test_a_command_says_what_it_starts_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "mode=sync", "optimizer.lr=2e-5"]) == 0
    out = capsys.readouterr().out
    assert "  name: gsm8k" in out and "  name: grpo" in out and "  lr: 2.0e-05" in out
    assert "# warning: settings of TorchRL's GRPO scripts: starting from the recipe grpo_gsm8k" in out
    assert main(["config", "--config-name", "default", "mode=sync", "optimizer.lr=2e-5"]) == 0
    out = capsys.readouterr().out
    assert "  name: sort" in out and "warning" not in out
