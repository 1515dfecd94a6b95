"""What vLLM gets of a prompt with images, without vLLM itself (tests/integration/test_vllm_vision.py has it)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from covey.models.vision import VisionProcessor
from covey.rollout.rendering import Renderer
from covey.rollout.vllm import VisionSettings
from covey.rollout.vllm.engine import shown
from covey.rollout.vllm.worker import opened, with_placeholders
from tests.vision.test_engine_and_learner import TWO
from tests.vision.tiny import an_image, asking, tiny_vlm

LARGE = asking("what is ", an_image(64, 48, 5), "?")  # more pixels than the model sees


def test_each_image_is_one_token() -> None:
    _, vision = tiny_vlm("qwen2_5_vl")
    renderer = Renderer(vision.tokenizer, vision=vision)
    prompt = renderer.render(TWO)
    images = [shown(span, vision) for span in prompt.images]
    short = with_placeholders(prompt.ids, images, vision.token_id)
    text = [token for token in prompt.ids if token != vision.token_id]
    assert [token for token in short if token != vision.token_id] == text
    assert short.count(vision.token_id) == 2
    assert renderer.vision is vision and vision.expand(short, [span.image for span in prompt.images]).ids == prompt.ids


def pixels_of(vision: VisionProcessor, picture: Any) -> Any:
    return vision.image_processor(images=[picture], return_tensors="np")["pixel_values"]


def test_a_picture_arrives_as_the_learner_sees_it() -> None:
    _, vision = tiny_vlm("qwen2_5_vl")
    for messages in (TWO, LARGE):
        for span in Renderer(vision.tokenizer, vision=vision).render(messages).images:
            image = shown(span, vision)
            picture = opened(image, asdict(VisionSettings.of(vision, trained=False)))
            rows, columns = span.grid or (0, 0)
            assert picture.size == (columns * 8, rows * 8)
            assert np.array_equal(pixels_of(vision, picture), vision.pixels(span.image)["pixel_values"].numpy())
