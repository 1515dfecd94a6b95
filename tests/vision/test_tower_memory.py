"""The memory of a trained vision tower, predicted and measured, and what the plan of a pass makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.config.schema import LearnerConfig
from covey.learner.learner import Learner
from covey.learner.pass_memory import Demand, PassMemory
from covey.learner.tower_memory import tower_shapes
from covey.memory import GIB
from covey.models.image_features import encode, vision_weights
from tests.vision.tiny import FAMILIES, an_image, tiny_vlm


def kept_by(model: Any, pixels: Any) -> int:
    """Bytes that encoding keeps for its backward pass, besides weights and pixels."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    own |= {tensor.untyped_storage().data_ptr() for tensor in pixels.values()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features = encode(model, pixels)  # holds the graph
    assert features.embeds_FD.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_prediction_against_measurement(family: str) -> None:
    """For a row of images only. What towers of different families keep differs; the prediction is an upper bound."""
    model, vision = tiny_vlm(family)
    image = an_image(32, 32, 1)
    tokens = vision.expand([vision.token_id], [image]).ids.count(vision.token_id)
    shapes = tower_shapes(model, Demand(prompt=tokens, answer=0))
    assert shapes is not None
    predicted = shapes.held(tokens, tokens, checkpointing=False)
    measured = kept_by(model, vision.pixels(image))
    assert 1.0 <= predicted / measured <= 2.5, f"{predicted:.0f}, measured {measured}"


def test_only_a_trained_tower_counts_and_only_for_images() -> None:
    model, _ = tiny_vlm("qwen2_5_vl")
    shapes = tower_shapes(model, Demand(prompt=75, answer=25))
    assert shapes is not None and shapes.per_token == pytest.approx(4 * 0.75)
    few = tower_shapes(model, Demand(prompt=75, answer=25, images=10))
    assert few is not None and few.per_token == pytest.approx(4 * 0.1)
    assert few.held(100, 100, checkpointing=False) < shapes.held(100, 100, checkpointing=False)
    for weight in vision_weights(model).values():
        weight.requires_grad_(False)
    assert tower_shapes(model, Demand(prompt=75, answer=25)) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_learner_plans_smaller_passes_when_the_tower_is_trained(family: str) -> None:
    plans = []
    for frozen in (True, False):
        model, vision = tiny_vlm(family)
        for weight in vision_weights(model).values():
            weight.requires_grad_(not frozen)
        learner = Learner(model, LearnerConfig(), total_updates=1, vision=vision)
        learner.plan_memory(Demand(prompt=400, answer=100))
        memory = learner._memory
        assert memory is not None and len(memory.shapes) == 1 + (not frozen)
        plans.append(memory.peak(1000, 500, checkpointing=False, logit_rows=100))
    assert plans[1] > plans[0]


def test_a_measured_pass_without_images_corrects_the_language_part_only() -> None:
    model, vision = tiny_vlm("qwen3_vl")
    learner = Learner(model, LearnerConfig(), total_updates=1, vision=vision)
    learner.plan_memory(Demand(prompt=400, answer=100))
    assert learner._memory is not None
    memory: PassMemory = replace(learner._memory, total=80 * GIB, gpu=True)
    language, tower = memory.shapes
    half = memory.corrected(language.held(256, 256, checkpointing=False) / 2, 256)
    assert half.shapes[0].scale == pytest.approx(0.5) and half.shapes[1] == tower
