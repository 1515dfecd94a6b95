"""Attention over packed sequences: what each token attends to, and the gradients."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from covey.config.schema import LearnerConfig
from covey.errors import InputError
from covey.learner import attention, forward
from covey.learner.attention import Layout
from covey.learner.learner import Learner
from covey.learner.packing import pack, plan_micro_batches, row_indices
from covey.types import Sample
from tests.conftest import tiny_llama
from tests.learner.helpers import rows_of
from tests.learner.test_forward import FAMILIES, family


def gradients(model: Any, rows: list[Sample], micro_batches: list[list[list[int]]], weight: torch.Tensor) -> Any:
    """The gradient of a weighted sum of all sampled tokens' log-probs, by weight."""
    model.zero_grad()
    for micro_batch in micro_batches:
        packed = pack(rows, micro_batch)
        order = row_indices(micro_batch)
        with attention.packed_attention(packed.layout):
            hidden = forward.hidden_states(model, packed)
            found = forward.token_logprobs(model, hidden, packed.target_M, 0.9)[0]
            each = weight[torch.tensor(order)[packed.row_M], packed.column_M]
            (found * each).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_with_a_shared_prompt_are_those_of_each_row_alone(name: str) -> None:
    for seed in range(3):
        model = family(name)
        rows = rows_of(4, 6, gaps=True, seed=seed)
        random.Random(seed).shuffle(rows)
        weight = torch.randn(len(rows), 16)
        shared = gradients(model, rows, plan_micro_batches(rows, 10_000)[0], weight)
        alone = gradients(model, rows, [[[index]] for index in range(len(rows))], weight)
        assert shared.keys() == alone.keys()
        for key, value in alone.items():
            assert float((shared[key] - value).norm() / value.norm().clamp(min=1e-6)) < 1e-5, key


def test_the_chunk_size_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(3, 5)
    model = tiny_llama()
    ((micro_batch,),) = plan_micro_batches(rows, 10_000)
    found = []
    for size in (1, 7, 512):
        monkeypatch.setattr(attention, "CHUNK", size)
        packed = pack(rows, micro_batch)
        found.append(forward.hidden_states(model, packed).detach())
        assert len(packed.layout.chunks) > 6 or size > 7
    torch.testing.assert_close(found[0], found[2], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[1], found[2], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_outside_of_packed_attention_the_model_attends_as_before() -> None:
    """After learning, a padded batch has the same logits: transformers' own mask is used again."""
    model = tiny_llama()
    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    before = model(ids, attention_mask=mask).logits
    Learner(model, LearnerConfig(), total_updates=1).logprobs(rows_of(1, 2), 1.0)
    assert model.config._attn_implementation == attention.SDPA
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], before[mask.bool()])


def test_a_model_that_attends_on_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    layer = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(layer, "forward", lambda self, hidden_states, **_: (hidden_states, None))
    rows = rows_of(1, 2)
    with pytest.raises(InputError, match="llama: this model's code computes attention on its own"):
        forward.hidden_states(model, pack(rows, plan_micro_batches(rows, 1000)[0][0]))


def test_lengths_that_decide_what_is_possible() -> None:
    layout = Layout.of([5, 3], [[4, 7], [0, 20]])
    assert (layout.prompt_tokens, layout.longest_segment, layout.longest_row) == (8, 20, 23)
    model = tiny_llama()
    assert not attention.select_attention(model, layout)  # float32, and no GPU
    assert layout.to(torch.device("cpu")) is layout
