"""Optimiser state in files of several ranks can be read back by any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from covey.algorithms import make
from covey.config.schema import LearnerConfig
from covey.learner.learner import Learner
from covey.learner.parallel import SINGLE_PROCESS, Ranks
from covey.learner.saving import NonFiniteWeights, export, load_state, save_model, save_state
from tests.conftest import byte_tokenizer, tiny_llama
from tests.learner.test_critic import make_learner, valued_batch
from tests.learner.test_forward import family


@pytest.mark.parametrize("readers", [1, 2, 3, 5])
def test_state_written_by_three_ranks_is_read_by_any_number(tmp_path: Path, readers: int) -> None:
    """Eight rows by 3, 3 and 2, and a weight of one row, which only the first rank has."""
    whole = {"exp_avg/big": torch.rand(8, 2), "exp_avg/small": torch.rand(1, 2), "step/big": torch.tensor(4.0)}
    for rank in range(3):
        big, small = (3 * rank, min(8, 3 * rank + 3)), (min(rank, 1), 1)
        held = {"exp_avg/big": whole["exp_avg/big"][slice(*big)], "step/big": whole["step/big"]}
        held["exp_avg/small"] = whole["exp_avg/small"][slice(*small)]
        save_state(held, {"big": (big, None), "small": (small, None)}, tmp_path, Ranks(rank, 3))
    each = -(-8 // readers)
    for reader in range(readers):
        first, last = min(8, each * reader), min(8, each * (reader + 1))
        small = (min(reader, 1), 1)
        found = load_state(tmp_path, {} if readers == 1 else {"big": ((first, last), None), "small": (small, None)})
        assert torch.equal(found["exp_avg/big"], whole["exp_avg/big"][first:last])
        assert torch.equal(found["exp_avg/small"], whole["exp_avg/small"][slice(*small)])
        assert torch.equal(found["step/big"], whole["step/big"])


def test_blocks_of_tensor_parallel_ranks_are_read_by_any_others(tmp_path: Path) -> None:
    """Two tensor-parallel groups of two: rows by group, columns by rank within it; and a replicated weight, written by
    the first rank of each group."""
    whole = {"exp_avg/wide": torch.rand(6, 4), "exp_avg/norm": torch.rand(6), "step/norm": torch.tensor(2.0)}
    for rank in range(4):
        group, member = divmod(rank, 2)
        rows, columns = (3 * group, 3 * group + 3), (2 * member, 2 * member + 2)
        held = {"exp_avg/wide": whole["exp_avg/wide"][slice(*rows), slice(*columns)], "step/norm": whole["step/norm"]}
        held["exp_avg/norm"] = whole["exp_avg/norm"][slice(*rows)] if member == 0 else torch.full((3,), torch.nan)
        replicated = {"norm"} if member else set()
        save_state(
            held, {"wide": (rows, columns), "norm": (rows, None)}, tmp_path, Ranks(rank, 4, tp_size=2), replicated
        )
    wanted: list[tuple[tuple[int, int], tuple[int, int] | None]] = [((0, 6), None), ((2, 5), None), ((1, 4), (1, 3))]
    for rows, columns in wanted:
        found = load_state(tmp_path, {"wide": (rows, columns), "norm": (rows, None)})
        expected = whole["exp_avg/wide"][slice(*rows), slice(*columns) if columns else slice(None)]
        assert torch.equal(found["exp_avg/wide"], expected)
        assert torch.equal(found["exp_avg/norm"], whole["exp_avg/norm"][slice(*rows)])
        assert torch.equal(found["step/norm"], whole["step/norm"])
    assert all(torch.equal(tensor, whole[name]) for name, tensor in load_state(tmp_path, {}).items())


def test_sharded_models_are_saved_with_their_buffers(tmp_path: Path) -> None:
    """GLM's router has a bias that is not trained. Weights that are not sharded are gathered as they are."""
    model = family("glm4_moe")
    for buffer in model.buffers():
        buffer.uniform_()
    save_model(model, tmp_path / "sharded", SINGLE_PROCESS, sharded=True)
    model.save_pretrained(tmp_path / "plain")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("sharded", "plain"))
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_adapters_are_written_in_one_order(tmp_path: Path) -> None:
    """peft keeps the names of modules in a set, whose order differs between processes."""
    import json

    import peft

    names = ["v_proj", "up_proj", "q_proj", "o_proj", "k_proj", "gate_proj", "down_proj"]
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=names, task_type="CAUSAL_LM"))
    save_model(model, tmp_path, SINGLE_PROCESS, sharded=False)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == sorted(names)


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_a_merged_adapter_keeps_the_precision_of_each_tensor(tmp_path: Path, dtype: str | None) -> None:
    """The biases of GLM's routers are float32 in a bfloat16 model."""
    import peft

    model = family("glm4_moe").bfloat16()
    for buffer in model.buffers():
        buffer.data = torch.rand(buffer.shape)
    model.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    model.name_or_path = str(tmp_path / "base")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    export(tmp_path / "adapter", tmp_path / "out", dtype=dtype)
    start, found = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    half = torch.bfloat16 if dtype is None else torch.float16
    assert set(found) == set(start) and {tensor.dtype for tensor in start.values()} == {torch.bfloat16, torch.float32}
    for name, tensor in start.items():
        assert torch.equal(found[name], tensor if tensor.dtype == torch.float32 else tensor.to(half)), name


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "optimizer: exp_avg/model.norm.weight",
        "optimizer: exp_avg_sq/lm_head.weight",
        "critic: weight/head.bias",
        "critic: backbone/exp_avg/norm.weight",
    ],
)
def test_non_finite_tensors_are_named_and_not_saved(tmp_path: Path, name: str, value: float) -> None:
    learner = make_learner()
    learner.update(valued_batch(), make("ppo"))
    assert learner.critic is not None
    tensors = dict(learner.model.named_parameters())
    tensors |= {f"optimizer: {key}": tensor for key, tensor in learner.optimizer.tensors().items()}
    tensors |= {f"critic: {key}": tensor for key, tensor in learner.critic.tensors().items()}
    with torch.no_grad():
        tensors[name].view(-1)[-1] = value
    with pytest.raises(NonFiniteWeights) as caught:
        learner.save(tmp_path)
    assert str(caught.value).splitlines()[0] == f"no checkpoint was written: {name} is not finite"
    assert not list(tmp_path.iterdir())


def test_masters_of_half_precision_weights_are_checked_too(tmp_path: Path) -> None:
    learner = Learner(tiny_llama(dtype=torch.bfloat16), LearnerConfig(), total_updates=1)
    learner.save(tmp_path)  # before the first update there are no moments yet
    learner.optimizer.masters["lm_head.weight"][0, 0] = torch.nan
    with pytest.raises(NonFiniteWeights, match=r"optimizer: master/lm_head\.weight is not finite"):
        learner.save(tmp_path)
