"""Every recipe: its header, its values against the source documents' tables, and that it is valid as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.config import recipe_names
from covey.config.compose import RECIPES
from tests.config.test_source_commands import quick as quick  # in an empty folder, without the hub

FOLDER = Path(__file__).parents[2] / "src" / RECIPES.replace(".", "/")
OLDER = ("default", "demo", "calculator")  # their headers tell it in their own way
EXPECTED_CURVES = ("demo", "calculator", "gvpo_minimal")  # small enough to be measured on two cores
TABLES = {  # problems a step, problems an update, memory of the engine: 4 A100, 4 B200
    "1.5b": ((512, 64, 0.65), (1024, 128, 0.85)),
    "qwen3_4b": ((384, 48, 0.55), (768, 96, 0.80)),
    "7b": ((256, 32, 0.50), (512, 64, 0.75)),
}


@pytest.mark.parametrize("name", [name for name in recipe_names() if name not in OLDER])
def test_a_header_says_what_hardware_result_and_command(name: str) -> None:
    header = re.match(r"(?:#.*\n)+", (FOLDER / f"{name}.yaml").read_text())[0]
    assert re.search(rf"^#   covey train --config-name {re.escape(name)}(?: {{3,}}.*)?$", header, re.MULTILINE)
    for word in ("Reproduces", "Hardware"):
        assert re.search(rf"^# {word} +\S", header, re.MULTILINE), word


@pytest.mark.parametrize("name", recipe_names())
def test_a_header_says_what_was_measured_and_what_is_only_quoted(name: str) -> None:
    """A measured figure names its place: a page or a test of this project that exists."""
    header = re.match(r"(?:#.*\n)+", (FOLDER / f"{name}.yaml").read_text())[0]
    found = {}
    for word in ("Measured", "Quoted"):
        entry = re.search(rf"^# {word} +(\S.*\n(?:#  +.*\n)*)", header, re.MULTILINE)
        assert entry is not None, word
        found[word] = re.sub(r"\s*\n#\s+", " ", entry[1]).strip()
    measured = found["Measured"]
    if not measured.startswith("nothing"):
        assert re.search(r"\d+(\.\d)? %", measured), "no figure"
    places = re.findall(r"\b(?:docs|tests|benchmarks)/[\w/]+\.(?:md|py)\b", measured)
    assert places or "%" not in measured
    assert all((FOLDER.parents[2] / place).is_file() for place in places)
    if name in EXPECTED_CURVES:
        assert "→" in measured


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_valid(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config-name", name, "--validate-only"]) == 0, capsys.readouterr().err
    warnings = re.findall(r"^warning: (.*)", capsys.readouterr().out, re.MULTILINE)
    expected = ("not on this machine: ", "rollout.group_size=2: gvpo is noisy below 4") + ("top_p",) * (
        name == "grpo_ifeval"
    )
    assert [text for text in warnings if not text.startswith(expected)] == []


@pytest.mark.parametrize("algorithm", ["gdpo", "dgdo"])
@pytest.mark.parametrize("model", TABLES)
def test_the_deepscaler_tables(algorithm: str, model: str, run) -> None:
    for suffix, row in zip(("", "_b200"), TABLES[model], strict=True):
        config = run(config_name=f"{algorithm}_deepscaler_{model}{suffix}").config
        assert (config.data.train_batch_size, config.learner.mini_batch_size, config.rollout.memory) == row
        assert config.algorithm.name == algorithm
        assert config.reward.name == ["math_verify", "length"]
        assert config.reward.only_if == {"length": "math_verify"}
        assert config.reward.options["length"]["max_tokens"] < config.rollout.max_tokens
        assert model.removeprefix("qwen3_").upper() in config.model.name.upper()


def test_the_weights_of_dgdo_are_the_guides(run) -> None:
    algorithm = run(config_name="dgdo_deepscaler_7b").config.algorithm
    settings = (algorithm.beta, algorithm.warmup_steps, algorithm.beta_start, algorithm.min_weight)
    assert settings == (0.9, 30, 0.5, 0.15)
    assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.28)  # of the recipe that it builds on


@pytest.mark.parametrize(("preset", "sizes"), [("small", (4, 2)), ("medium", (16, 4)), ("large", (32, 8))])
def test_the_presets_of_gvpo(preset: str, sizes: tuple[int, int], run) -> None:
    config = run(config_name=f"gvpo_math_{preset}").config
    assert (config.data.train_batch_size, config.rollout.group_size) == sizes
    assert (config.algorithm.beta, config.algorithm.reference, config.learner.lr) == (0.1, "initial", 1e-6)


@pytest.mark.parametrize(("name", "beta"), [("demo", 0.05), ("gvpo_minimal", 0.1), ("gvpo_math", 0.1)])
def test_recipes_of_gvpo_name_their_anchor(name: str, beta: float, run) -> None:
    """Their figures, and the documents they are from, are those of the start model as anchor, not of the default."""
    algorithm = run(config_name=name).config.algorithm
    assert (algorithm.reference, algorithm.beta) == ("initial", beta)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (
            "grpo_gsm8k",
            "env.dataset=gsm8k env.repeats=16 model.name=Qwen/Qwen2.5-3B train.total_dialog_turns=100000 "
            "train.dialog_turns_per_batch=32 train.optim_batch_size=32 train.gradient_accumulation_steps=8 "
            "train.checkpoint_frequency=100 train.kl_coef_in_loss=true train.kl_to_ref_coeff=0.0 "
            "train.kl_to_inference_coeff=1e-2 train.entropy_coeff=1e-4 train_model.gradient_checkpointing=true "
            "train_model.lora.enabled=true train_model.lora.r=8 train_model.lora.alpha=16 "
            "train_model.torch_dtype=bfloat16 inference_model.max_tokens=1024 optimizer.lr=1e-5 optimizer.eps=1e-5 "
            "optimizer.clip_grad_norm=1.0 train.exp_name=grpo-gsm8k",
        ),
        (
            "grpo_ifeval",
            "env.dataset=ifeval env.repeats=16 model.name=Qwen/Qwen2.5-7B train.total_dialog_turns=100000 "
            "train.dialog_turns_per_batch=64 train.optim_batch_size=16 train.gradient_accumulation_steps=16 "
            "train.checkpoint_frequency=100 train.kl_coef_in_loss=false train.kl_to_ref_coeff=1.0 "
            "train.entropy_coeff=0.001 train_model.gradient_checkpointing=true train_model.lora.r=8 "
            "train_model.lora.alpha=16 train_model.torch_dtype=bfloat16 inference_model.top_p=0.95 "
            "inference_model.max_tokens=2048 optimizer.lr=1e-5 optimizer.clip_grad_norm=10.0 "
            "train.exp_name=grpo-ifeval",
        ),
    ],
)
def test_the_grpo_recipes_are_the_guides_own_values(recipe: str, words: str, run) -> None:
    """Written in the guide's words on top of the recipe, they change nothing."""
    plain, again = run(config_name=recipe), run(*words.split(), config_name=recipe)
    expected = dict(plain.tree["learner"])
    if recipe == "grpo_gsm8k":
        expected["mini_batch_size"] = 2  # all groups of the step, written out
    assert again.tree["learner"] == expected
    assert again.tree | {"learner": None} == plain.tree | {"learner": None}
