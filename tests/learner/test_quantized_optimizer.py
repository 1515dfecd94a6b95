"""AdamW with moments in 8 bits, against torch's, and its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from covey.algorithms import make
from covey.config.schema import LearnerConfig
from covey.errors import InputError
from covey.learner.learner import Learner
from covey.learner.optimizer import check_optimizer
from tests.conftest import tiny_llama
from tests.learner.helpers import batch_of, rows_of

pytest.importorskip("bitsandbytes")

CONFIG = LearnerConfig(lr=1e-3, optimizer="adamw8bit", weight_decay=0.1)


def model_of(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """With matrices of 64 × 64 elements and more: smaller ones keep float32 moments."""
    model: torch.nn.Module = tiny_llama(hidden_size=64, intermediate_size=128, dtype=dtype)
    return model


def updated(learner: Learner, steps: range) -> Learner:
    for seed in steps:
        learner.update(batch_of(rows_of(2, 4, seed=seed), 4, dtype=torch.float32, seed=seed), make("grpo"))
    return learner


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def test_updates_are_those_of_adamw_up_to_8_bits() -> None:
    start, exact, coarse = model_of(), model_of(), model_of()
    whole = updated(Learner(exact, replace(CONFIG, optimizer="adamw"), total_updates=8), range(8))
    eighth = updated(Learner(coarse, CONFIG, total_updates=8), range(8))
    moved, other = weights(exact) - weights(start), weights(coarse) - weights(start)
    assert torch.nn.functional.cosine_similarity(moved, other, 0) > 0.97
    assert float(other.norm() / moved.norm()) == pytest.approx(1, abs=0.05)
    sizes = [sum(t.nbytes for t in learner.optimizer.tensors().values()) for learner in (whole, eighth)]
    assert sizes[1] < 0.35 * sizes[0]  # the smallest matrices keep float32


def test_half_precision_keeps_float32_masters() -> None:
    learner = updated(Learner(model_of(torch.bfloat16), CONFIG, total_updates=2), range(2))
    assert {master.dtype for master in learner.optimizer.masters.values()} == {torch.float32}
    assert any(tensor.dtype == torch.uint8 for tensor in learner.optimizer.tensors().values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_bit_identical(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = updated(Learner(model_of(dtype), CONFIG, total_updates=6), range(6))
    first = updated(Learner(model_of(dtype), CONFIG, total_updates=6), range(3))
    first.save(tmp_path)
    model = model_of(dtype)
    model.load_state_dict(first.model.state_dict())
    second = Learner(model, CONFIG, total_updates=6)
    second.restore(tmp_path, first.counters())
    updated(second, range(3, 6))
    assert torch.equal(weights(second.model), weights(whole.model))
    for name, tensor in whole.optimizer.tensors().items():
        assert torch.equal(second.optimizer.tensors()[name], tensor), name


@pytest.mark.parametrize(("saved", "loaded"), [("adamw", "adamw8bit"), ("adamw8bit", "adamw")])
def test_moments_of_the_other_optimiser_are_refused(tmp_path: Path, saved: str, loaded: str) -> None:
    learner = updated(Learner(model_of(), replace(CONFIG, optimizer=saved), total_updates=2), range(1))
    learner.save(tmp_path)
    other = Learner(model_of(), replace(CONFIG, optimizer=loaded), total_updates=2)
    with pytest.raises(InputError, match=f"continue with learner.optimizer={saved}$"):
        other.restore(tmp_path, learner.counters())


def test_sharded_states_are_refused() -> None:
    with pytest.raises(InputError, match="do not follow the rows of shards"):
        check_optimizer(replace(CONFIG, parallel="fsdp"))
    with pytest.raises(InputError, match=r"learner\.parallel=ddp"):
        check_optimizer(replace(CONFIG, tensor_parallel=2))
    check_optimizer(replace(CONFIG, parallel="ddp"))
