"""Runs with a teacher: convergence, prompts that only the teacher reads, a teacher behind an endpoint, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import covey
from covey.cli.main import main
from covey.config.schema import ModelConfig
from covey.errors import InputError, RunFailed
from covey.models.loading import load_policy, open_source
from tests.conftest import byte_tokenizer
from tests.training.test_resume import outcome, train, train_here

SMALL: dict[str, Any] = {
    "algorithm": "distill",
    "data": {"train_batch_size": 4},
    "rollout": {"group_size": 16, "max_tokens": 2},
    "eval": {"before": False, "after": False},
    "logging": {"to": [], "verbosity": "warning"},
    "resume": "disable",
}
ROWS = [{"question": f"say {i}", "answer": "ab"[i % 2], "hint": f"the letter {'ab'[i % 2]}"} for i in range(4)]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """`tiny_model_folder` with another last matrix, which a student can learn, and six more outputs."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    model = load_policy(open_source(ModelConfig(str(tiny_model_folder))), ModelConfig())
    torch.manual_seed(7)
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight.normal_(0, 0.3)
    model.resize_token_embeddings(model.config.vocab_size + 6)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run(model: Path, steps: int, **settings: Any) -> list[dict[str, float]]:
    loop = {"total_steps": steps, "save_final": False}
    trainer = covey.Trainer(model=str(model), tasks=ROWS, reward=always, **{**SMALL, "loop": loop, **settings})
    return [dict(step.metrics) for step in trainer]


def always(final_answer: str) -> float:
    return 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"teacher.kl": "full"},
        {"teacher.kl": "sampled"},
        {"teacher.kl": "full", "model.lora": {"rank": 32}, "learner.lr": 1e-2},
        {"teacher.kl": "sampled", "mode": "async"},
    ],
    ids=["full", "sampled", "lora", "async"],
)
def test_the_student_becomes_its_teacher(
    tiny_model_folder: Path, teacher_folder: Path, settings: dict[str, Any]
) -> None:
    """KL over the vocabulary of samples, measured by a last step with kl=full."""
    given = {"learner.lr": 5e-3, "learner.schedule": "linear", "teacher.name": str(teacher_folder), **settings}
    metrics = run(tiny_model_folder, 150, **given)
    start, end = (sum(m["distill/kl"] for m in part) / 5 for part in (metrics[:5], metrics[-5:]))
    assert all(m["distill/share"] == 1.0 for m in metrics)
    print("ENDS", settings, start, end)
    assert start > 0.5 and abs(end) < 0.1 * start
