"""The floors of benchmarks/kit: parameters against real models, seconds by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

SMALL = {"hidden": 4, "layers": 3, "heads": 2, "kv_heads": 1, "head_dim": 2, "intermediate": 8, "vocabulary": 10}


def small(**changes: Any) -> Any:
    from kit.floors import Shape

    return Shape(**SMALL, tied=True, **changes)


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen2.5-0.5b", 0.494), ("qwen2.5-1.5b", 1.544), ("qwen2.5-7b", 7.616)]
)
def test_a_shape_has_the_published_number_of_parameters(name: str, billions: float) -> None:
    from kit.floors import Shape
    from kit.models import model_config, random_model

    model = random_model(model_config(name), "meta", "bfloat16")
    real = sum(p.numel() for p in model.parameters())
    assert real == pytest.approx(billions * 1e9, rel=1e-3)
    assert Shape.of(model.config).parameters == pytest.approx(real, rel=1e-3)  # norms and biases are left out


def test_what_a_forward_pass_multiplies_with() -> None:
    shape = small()
    # A layer: q and o are 4 × 4, k and v 4 × 2; three matrices of 4 × 8.
    assert shape.body == 3 * (2 * 16 + 2 * 8 + 3 * 32)
    assert shape.output == 40
    untied = dataclasses.replace(shape, tied=False)
    assert untied.weights == shape.weights  # the other matrix is only looked up
    assert untied.parameters == shape.parameters + 40


def test_kv_bytes() -> None:
    from kit.floors import Shape
    from kit.models import model_config

    assert small().kv_bytes(2) == 2 * 3 * 1 * 2 * 2
    assert Shape.of(model_config("qwen2.5-0.5b")).kv_bytes(2) == 12288


def test_a_queue_is_bound_by_memory_or_by_arithmetic() -> None:
    from kit.floors import Rates, Request, queue_seconds, sampling_flops

    shape = small()
    # Two answers of 3 and 2 tokens after a cached token and a prompt of 4, and one of 5 after a prompt of 2: the last
    # token of each is not computed.
    load = [Request(1, 4, [3, 2]), Request(0, 2, [5])]
    # A prompt of 4 after 1 attends to 4 · 1 + 4² / 2 tokens, its answers to 2 · 5 + 2² / 2 and 5 + 1 / 2 of them.
    context = (4 + 8) + (10 + 2) + (5 + 0.5) + 2 + (4 * 2 + 8)
    flops = 2 * shape.body * (4 + 3 + 2 + 4) + 2 * shape.output * (1 + 3 + 1 + 4) + 4 * 3 * 4 * context
    assert sampling_flops(shape, load) == pytest.approx(flops)
    assert queue_seconds(shape, Rates(1e12, 10.0, ""), 2, load, rows=2) == pytest.approx(flops / 10)
    # Seven computed tokens: one at a time, or as many steps as the longest answer has.
    answers = (12 + 5.5 + 16) * shape.kv_bytes(2)
    for rows, steps in ((1, 7), (2, 4), (9, 4)):
        moved = steps * shape.weights * 2 + answers
        assert queue_seconds(shape, Rates(100.0, 1e12, ""), 2, load, rows) == pytest.approx(moved / 100)


def test_decoding_is_bound_by_memory_or_by_arithmetic() -> None:
    from kit.floors import Rates, decode_seconds

    shape = small()
    weights, kv = shape.weights * 2, shape.kv_bytes(2)
    memory = Rates(bandwidth=100.0, flops=1e12, source="")
    # Lengths 1 and 3 after a prompt of 5: one answer is done with the prefill, the other decodes twice alone.
    by_hand = (weights + 6 * kv) / 100 + (weights + 7 * kv) / 100
    assert decode_seconds(shape, memory, 2, 5, [3, 1]) == pytest.approx(by_hand)
    both = (weights + 2 * 6 * kv) / 100 + (weights + 7 * kv) / 100
    assert decode_seconds(shape, memory, 2, 5, [3, 2]) == pytest.approx(both)
    arithmetic = Rates(bandwidth=1e12, flops=100.0, source="")
    assert decode_seconds(shape, arithmetic, 2, 5, [2] * 7) == pytest.approx(2 * shape.weights * 7 / 100)
    assert decode_seconds(shape, memory, 2, 5, [1, 1]) == 0


@pytest.mark.parametrize("tokens", [2, 7, 512])
def test_a_row_alone_costs_six_n_and_its_attention(tokens: int) -> None:
    from kit.floors import Load, training_flops

    shape = small()
    expected = tokens * (6 * shape.weights + 6 * shape.layers * shape.d_q * tokens)
    assert training_flops(shape, Load(1, 1, 1, tokens)) == pytest.approx(expected)


def test_the_prompt_of_a_group_is_counted_once_and_predicts_nothing() -> None:
    from kit.floors import Load, prefill_seconds, training_flops
    from kit.floors import Rates as R

    shape = small()
    one, two = (training_flops(shape, Load(1, group, 9, 5)) for group in (1, 2))
    answer = 6 * shape.body * 4 + 6 * shape.output * 5 + 12 * shape.layers * shape.d_q * (4 * 9 + 4 * 4 / 2)
    assert two - one == pytest.approx(answer)
    assert one - answer == pytest.approx(6 * shape.body * 9 + 12 * shape.layers * shape.d_q * 81 / 2)
    rates = R(1.0, 1.0, "")
    assert prefill_seconds(shape, rates, Load(3, 1, 9, 5)) == prefill_seconds(shape, rates, Load(3, 8, 9, 5))


@pytest.mark.parametrize(("name", "seconds"), [("qwen2.5-0.5b", 0.4), ("qwen2.5-1.5b", 1.2)])
def test_the_floor_of_a_step_on_an_h200(name: str, seconds: float) -> None:
    """32 prompts × 8 answers, 256 + 256 tokens."""
    from kit.floors import Load, Shape, learning_seconds, sampling_seconds
    from kit.measure import KNOWN
    from kit.models import model_config

    shape, load, rates = Shape.of(model_config(name)), Load(32, 8, 256, 256), KNOWN["H200"]
    assert sampling_seconds(shape, rates, 2, load) + learning_seconds(shape, rates, load) == pytest.approx(
        seconds, rel=0.05
    )


def test_rates_are_measured_where_they_are_not_known() -> None:
    from kit.measure import rates

    found = rates("cpu", torch.float32, quick=True)
    assert 1e6 < found.bandwidth < 1e13 and 1e6 < found.flops < 1e15
    assert found.source.startswith("measured")


def test_random_models_and_prompts() -> None:
    from kit.models import as_text, model_config, random_ids, random_model, word_tokenizer

    first, again, other = (random_model(model_config("tiny"), "cpu", "float32", seed) for seed in (1, 1, 2))
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    prompts = random_ids(512, 20, 3, "x")
    assert len({ids[0] for ids in prompts}) == 20  # so no two begin alike
    assert prompts != random_ids(512, 20, 3, "y")
    tokenizer = word_tokenizer(512)
    for ids in prompts:
        message = [{"role": "user", "content": as_text(ids)}]
        assert tokenizer.apply_chat_template([message], add_generation_prompt=True)["input_ids"] == [ids]
    assert tokenizer.eos_token_id == 511 and max(map(max, prompts)) < 511
