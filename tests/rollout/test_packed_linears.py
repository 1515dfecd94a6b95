"""Linear layers with repacked weights."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from covey.rollout.embedded import cpu_batch
from covey.rollout.embedded.cpu_batch import PackedLinears
from covey.types import Sampling
from tests.conftest import tiny_llama
from tests.learner.test_forward import family
from tests.rollout.plain import Request, answers, assert_as_alone, engine_for

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")

REQUESTS: list[Request] = [([5, 6, 7, n], Sampling(max_tokens=20, seed=n)) for n in range(9, 14)]


def unchanged(model: Any) -> bool:
    return not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("shape", [(1,), (7,), (64,), (3, 1), (2, 5)])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_the_product_is_the_same(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 33, bias=bias), torch.nn.Tanh(), torch.nn.Linear(33, 80))
    x = torch.randn(*shape, 48)
    expected = model(x)
    layers = PackedLinears(model)
    layers.pack()
    with layers.used():
        assert not unchanged(model)
        torch.testing.assert_close(model(x), expected)
    assert unchanged(model)
    assert torch.equal(model(x), expected)


def test_they_are_laid_out_when_many_steps_are_ahead_and_used_until_new_weights_come() -> None:
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[])
    batch = engine._batch
    assert isinstance(batch, cpu_batch.RowBatch)
    answers(engine, [([5, 6], Sampling(max_tokens=cpu_batch.MIN_STEPS - 1))])
    assert not batch.linears.forwards
    assert_as_alone(model, REQUESTS, answers(engine, REQUESTS))
    assert len(batch.linears.forwards) == 2 * 7 + 1  # of two layers, and the output matrix
    assert unchanged(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    asyncio.run(engine.publish(model, version=1))
    assert not batch.linears.forwards
    assert_as_alone(model, REQUESTS, answers(engine, REQUESTS))
    assert batch.linears.forwards


def test_an_error_leaves_the_learners_layers_as_they_were() -> None:
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[])
    answers(engine, REQUESTS)

    def broken(*_: Any) -> None:
        raise RuntimeError("out of luck")

    hook = model.model.layers[1].register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        answers(engine, REQUESTS)
    hook.remove()
    assert unchanged(model)
    assert_as_alone(model, REQUESTS, answers(engine, REQUESTS))


def test_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(
        family("qwen2"), peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    ).eval()
    monkeypatch.setattr(cpu_batch, "MIN_STEPS", 1)
    assert_as_alone(model, REQUESTS, answers(engine_for(model, eos_ids=[]), REQUESTS))


def test_no_copy_where_it_would_be_large_or_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PackedLinears(tiny_llama(dtype=torch.bfloat16)).layers == []
    assert len(PackedLinears(tiny_llama()).layers) == 15
    monkeypatch.setattr(cpu_batch, "SHARE", 1e-9)
    assert PackedLinears(tiny_llama()).layers == []
