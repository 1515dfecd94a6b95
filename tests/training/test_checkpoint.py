"""Checkpoints are complete or absent, and restore exactly what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from covey.algorithms import make
from covey.config.schema import LearnerConfig
from covey.learner.learner import Learner
from covey.storage import StorageFailed
from covey.training.checkpoint import CheckpointStore, DamagedCheckpoint, open_checkpoint
from tests.conftest import byte_tokenizer, tiny_llama
from tests.learner.helpers import batch_of, rows_of


def trained_learner(model: Any = None) -> Learner:
    learner = Learner(model or tiny_llama(), LearnerConfig(lr=1e-3), total_updates=10)
    for seed in range(2):
        learner.update(batch_of(rows_of(2, 4, seed=seed), 4, dtype=torch.float32), make("grpo"))
    return learner


def store(folder: Path, **options: Any) -> CheckpointStore:
    return CheckpointStore(folder, **({"keep_last": 2, "keep_best": True} | options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_learner_continues_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    tiny_llama().save_pretrained(tmp_path / "start")
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=dtype, attn_implementation="sdpa").eval()
    learner = trained_learner(start)
    saved = store(tmp_path / "checkpoints").save(2, learner, byte_tokenizer(), {"best": None})
    model = AutoModelForCausalLM.from_pretrained(saved.model, dtype=dtype, attn_implementation="sdpa").eval()
    again = Learner(model, LearnerConfig(lr=1e-3), total_updates=10)
    found = open_checkpoint(saved.folder)
    again.restore(found.folder, found.state["learner"])
    batch = batch_of(rows_of(2, 4, seed=9), 4, dtype=torch.float32)
    first, second = learner.update(batch, make("grpo"))[0], again.update(batch, make("grpo"))[0]
    assert first == second
    for (name, a), (_, b) in zip(learner.model.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert again.optimizer.steps == 3


def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(tmp_path: Path) -> None:
    learner, checkpoints = trained_learner(), store(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, learner, byte_tokenizer(), {"best": None})
    weights = tmp_path / "step-000002" / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    warnings: list[str] = []
    found = checkpoints.latest(warnings.append)
    assert found is not None and found.step == 1
    assert "step-000002" in warnings[0] and "model.safetensors does not match" in warnings[0]


@pytest.mark.parametrize("how", ["missing file", "no manifest", "truncated manifest"])
def test_kinds_of_damage(tmp_path: Path, how: str) -> None:
    folder = store(tmp_path).save(1, trained_learner(), byte_tokenizer(), {"best": None}).folder
    if how == "missing file":
        (folder / "optimizer.safetensors").unlink()
    elif how == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_text('{"state.json": "12')
    with pytest.raises(DamagedCheckpoint):
        open_checkpoint(folder)


def test_an_interrupted_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = store(tmp_path)
    checkpoints.save(1, trained_learner(), byte_tokenizer(), {"best": None})

    def full_disk(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("covey.learner.saving.save_file", full_disk)
    with pytest.raises(StorageFailed, match="step-000002: No space"):
        checkpoints.save(2, trained_learner(), byte_tokenizer(), {"best": None})
    (tmp_path / ".writing-killed").mkdir()  # as after SIGKILL during a write
    found = checkpoints.latest(print)
    assert found is not None and found.step == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_the_last_two_and_the_best_are_kept(tmp_path: Path) -> None:
    learner, checkpoints = trained_learner(), store(tmp_path)
    for step in range(1, 6):
        checkpoints.save(step, learner, byte_tokenizer(), {"best": {"step": 2, "value": 0.9}})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000004", "step-000005"]


def test_nothing_is_pickled(tmp_path: Path) -> None:
    folder = store(tmp_path).save(1, trained_learner(), byte_tokenizer(), {"best": None}).folder
    suffixes = {p.suffix for p in folder.rglob("*") if p.is_file()}
    assert suffixes <= {".safetensors", ".json", ".jinja"}
