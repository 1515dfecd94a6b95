"""Every recipe, scaled down to a tiny model, two tasks and two steps, really runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.config import recipe_names
from tests.config.conftest import run as run

SMALL = [
    *("data.train_batch_size=2", "data.val_size=2"),
    *("rollout=embedded", "rollout.max_tokens=6", "rollout.max_sequences=8"),
    *("loop.total_steps=2", "loop.total_epochs=null", "loop.save_every=0", "loop.save_final=false"),
    *("eval.every=0", "eval.before=false", "eval.after=false"),
    *("model.dtype=float32", "model.device=cpu", "model.gradient_checkpointing=false", "agent.template=null"),
]
QUESTIONS = [{"question": f"{i} + 1 ?", "answer": str(i + 1)} for i in range(2)]
PROGRAMS = [
    {"question": "a function f", "answer": "", "test_list": ["assert f(1) == 1"], "test_setup_code": ""},
    {"question": "a function g", "answer": "", "test_list": ["assert g(1) == 2"], "test_setup_code": ""},
]
FOLLOWED = [{"prompt": f"say {i}", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]} for i in range(2)]
ROWS: dict[str, list[dict[str, Any]]] = {"mbpp": PROGRAMS, "ifeval": FOLLOWED}
GENERATED = ("sort", "largest", "calculator", "arithmetic", "countdown")
GROUPS = {"agent_search": 1, "gvpo_math_small": 2}  # attempts; 4 otherwise
# The same as what they build on, but for sizes that are scaled down in any case.
SIZES_ONLY = ("_small", "_b200", "_7b", "_qwen3_4b", "_medium", "_large")


def scaled_down(recipe: str, run: Any) -> list[str]:
    """The settings that make a recipe small; its data are files of two rows in the same columns."""
    config = run(config_name=recipe).config
    settings = [*SMALL, f"rollout.group_size={GROUPS.get(recipe, 4)}"]
    if config.learner.mini_batch_size is not None:
        settings += ["learner.mini_batch_size=1", "learner.micro_batch_size=4"]
    if config.data.name not in GENERATED:
        rows = ROWS.get(config.data.name, QUESTIONS)
        Path("tiny.jsonl").write_text("\n".join(map(json.dumps, rows)))
        settings += ["data.train_files=tiny.jsonl", "data.options={}"]
        if config.reward.name == "auto":
            settings.append("reward=" + ("ifeval" if config.data.name == "ifeval" else "math_verify"))
    if "length" in config.reward.name:
        settings.append("reward.options.length.max_tokens=3")
    return settings


def check(recipe: str, run: Any, tiny_model_folder: Path) -> None:
    words = [f"model={tiny_model_folder}", "model.context_length=4096", *scaled_down(recipe, run)]
    assert main(["train", "--config-name", recipe, *words]) == 0
    (path,) = Path().glob("outputs/*/*/metrics.jsonl")
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["kind"] for record in steps].count("step") == 2


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERPER_API_KEY", "none, and never asked: so small a model calls no tool")
    monkeypatch.setattr("covey.tasks.load.GENERATED_TRAIN", 4)


def _listed() -> list[Any]:
    slow = [name for name in recipe_names() if name.endswith(SIZES_ONLY)]
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in recipe_names()]


@pytest.mark.parametrize("recipe", _listed())
def test_two_steps_of_a_recipe(recipe: str, run: Any, tiny_model_folder: Path) -> None:
    check(recipe, run, tiny_model_folder)
