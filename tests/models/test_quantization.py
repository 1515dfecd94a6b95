"""Base weights in 4 bits: engine and learner agree, adapters learn and are saved, and what cannot work is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.algorithms.likelihood import Likelihood
from covey.config.schema import Config, LearnerConfig, LoraConfig, ModelConfig, RolloutConfig
from covey.errors import Absent, InputError
from covey.learner.learner import Learner
from covey.learner.pass_memory import Demand
from covey.learner.saving import export
from covey.models.loading import load_policy, open_source
from covey.models.quantization import check_quantization, is_quantized
from covey.rollout.embedded import EmbeddedEngine
from covey.types import Sample, Sampling
from tests.conftest import byte_tokenizer, tiny_llama
from tests.learner.helpers import batch_of, rows_of
from tests.rollout.plain import answers

bitsandbytes = pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices have at least one block of 64 weights per row."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    sizes = {"vocabulary": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
    tiny_llama(**sizes, eos_token_id=tokenizer.eos_token_id).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def settings(folder: Path, **changes: Any) -> ModelConfig:
    return ModelConfig(name=str(folder), quantization="nf4", lora=LoraConfig(rank=4), device="cpu", **changes)


def policy_of(folder: Path, **changes: Any) -> Any:
    config = settings(folder, **changes)
    return load_policy(open_source(config), config)


def test_matrices_are_stored_in_4_bits(folder: Path) -> None:
    model = policy_of(folder)
    layer = model.get_base_model().model.layers[0].mlp.up_proj.base_layer
    assert is_quantized(layer.weight) and layer.weight.numel() == 128 * 64 // 2
    plain = open_source(ModelConfig(name=str(folder)))
    exact = load_policy(plain, ModelConfig(name=str(folder), device="cpu")).model.layers[0].mlp.up_proj.weight
    kept = bitsandbytes.functional.dequantize_4bit(layer.weight, layer.weight.quant_state)
    assert 0.01 < float((kept - exact).norm() / exact.norm()) < 0.12  # NF4's error on normal weights is about 9 %
    assert not is_quantized(model.get_base_model().lm_head.weight)
    assert {n.split(".")[-3] for n, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}


def test_gradients_are_those_of_the_dequantised_weights(folder: Path) -> None:
    """Against a plain model whose matrices are the 4-bit weights in float32, after passes without gradient."""
    model = policy_of(folder)
    base = model.get_base_model()
    plain_config = ModelConfig(name=str(folder), lora=LoraConfig(rank=4), device="cpu")
    plain = load_policy(open_source(plain_config), plain_config)
    with torch.no_grad():
        for name, module in base.named_modules():
            if is_quantized(weight := getattr(module, "weight", None)):
                other = plain.get_base_model().get_submodule(name).weight
                other.copy_(bitsandbytes.functional.dequantize_4bit(weight, weight.quant_state))
    rows = rows_of(2, 3)
    batch = batch_of(rows, 3, dtype=torch.float32)
    found = []
    for each in (model, plain):
        learner = Learner(each, LearnerConfig(lr=1e-3), total_updates=2)
        logprobs = [learner.logprobs(rows, 1.0)]
        norms = [learner.update(batch, Likelihood())[0]["grad/norm"] for _ in range(2)]
        found.append((torch.stack([*logprobs, learner.logprobs(rows, 1.0)]), norms))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-4, rtol=1e-4)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-3)


def test_engine_and_learner_agree(folder: Path) -> None:
    model = policy_of(folder)
    with torch.no_grad():  # adapters that do something
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05)
    engine = EmbeddedEngine(model, eos_ids=(2,), decode=str)
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    done = answers(engine, [(prompt, Sampling(max_tokens=12, seed=i)) for i, prompt in enumerate(prompts)])
    engine.close()
    rows = [
        Sample(tuple(p), d.token_ids, (True,) * len(d.token_ids), d.logprobs, d.versions, i)
        for i, (p, d) in enumerate(zip(prompts, done, strict=True))
    ]
    found = Learner(model, LearnerConfig(), total_updates=1).logprobs(rows, 1.0)
    for row, logprobs in zip(rows, found, strict=True):
        assert logprobs[: len(row.logprobs)].tolist() == pytest.approx(list(row.logprobs), abs=1e-4)


@pytest.mark.parametrize("checkpointing", [None, True])
def test_the_adapter_learns_and_the_base_stays(folder: Path, checkpointing: bool | None) -> None:
    """Likelihood of fixed answers: the loss falls, and no 4-bit weight changes."""
    model = policy_of(folder, gradient_checkpointing=checkpointing)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    learner = Learner(model, LearnerConfig(lr=1e-2), total_updates=10)
    learner.plan_memory(Demand(answer=16, checkpointing=checkpointing))
    batch = batch_of(rows_of(2, 2), 2, dtype=torch.float32)
    losses = [learner.update(batch, Likelihood())[0]["loss/total"] for _ in range(10)]
    assert losses[-1] < 0.8 * losses[0]
    for name, p in model.named_parameters():
        assert p.requires_grad or torch.equal(p, frozen[name])


def test_adapters_are_saved_loaded_and_merged(folder: Path, tmp_path: Path) -> None:
    model = policy_of(folder)
    learner = Learner(model, LearnerConfig(lr=1e-2), total_updates=2)
    learner.update(batch_of(rows_of(2, 2), 2, dtype=torch.float32), Likelihood())
    learner.save(tmp_path / "checkpoint")
    saved = tmp_path / "checkpoint" / "model"
    again = replace(settings(folder), name=str(saved))
    loaded = load_policy(open_source(again), again)
    rows = rows_of(2, 2)
    exact = learner.logprobs(rows, 1.0)
    assert torch.equal(Learner(loaded, LearnerConfig(), total_updates=1).logprobs(rows, 1.0), exact)
    merged = tmp_path / "merged"
    assert "merged into" in export(saved, merged)
    whole = load_policy(open_source(ModelConfig(name=str(merged))), ModelConfig(name=str(merged), device="cpu"))
    other = Learner(whole, LearnerConfig(), total_updates=1).logprobs(rows, 1.0)
    assert float((other - exact).abs().max()) < 0.5  # the base model's own weights, not those of 4 bits


def config_of(folder: Path, **changes: Any) -> Config:
    return replace(Config(model=settings(folder)), **changes)


def test_what_cannot_work_is_refused(folder: Path) -> None:
    check_quantization(config_of(folder), adapter=False)
    cases: list[tuple[Any, str]] = [
        ({"model": replace(settings(folder), lora=LoraConfig())}, "model.lora.rank=16"),
        ({"rollout": RolloutConfig(name="vllm")}, "use rollout=embedded"),
        ({"learner": LearnerConfig(parallel="fsdp")}, "learner.parallel=ddp"),
        ({"learner": LearnerConfig(tensor_parallel=2)}, "cannot be sharded"),
    ]
    for changes, text in cases:
        with pytest.raises(InputError, match=text):
            check_quantization(config_of(folder, **changes), adapter=False)
    with pytest.raises(InputError, match="quantization"):
        ModelConfig(quantization="int3")


def test_without_bitsandbytes_its_installation_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(Absent, match=r"model.quantization=nf4 needs bitsandbytes: .*quantization"):
        check_quantization(config_of(folder), adapter=False)
