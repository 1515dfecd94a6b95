"""Vision-language models on a GPU: captured decode steps and text prompts; prompts with new images without a graph."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from covey.models.vision import VisionProcessor
from covey.rollout.rendering import Renderer
from covey.types import Completion, Prompt, Sampling
from tests.rollout.conftest import MakeEngine
from tests.rollout.triton_support import DEVICE, needs_triton
from tests.vision.test_engine_and_learner import ONE, OTHER, TEXT, TWO, expected
from tests.vision.tiny import FAMILIES, GRIDS, tiny_vlm

pytestmark = needs_triton
TOLERANCE = 1e-4 if DEVICE.type == "cpu" else 3e-4


class Vlm:
    """A tiny model, its engine, and a copy on the CPU to compare with."""

    def __init__(self, family: str, on_gpu: MakeEngine) -> None:
        model, self.vision = tiny_vlm(family)
        self.plain: tuple[Any, VisionProcessor] = copy.deepcopy(model), self.vision
        self.engine = on_gpu(model.to(DEVICE), vision=self.vision)
        self.renderer = Renderer(self.vision.tokenizer, vision=self.vision)

    def sample(self, prompts: list[Prompt]) -> list[Completion]:
        async def all_at_once() -> list[Completion]:
            samplings = (Sampling(0.9, max_tokens=4 + 5 * (n % 3), seed=n) for n in range(len(prompts)))
            jobs = (self.engine.generate(p.ids, s, p.images) for p, s in zip(prompts, samplings, strict=True))
            return list(await asyncio.gather(*jobs))

        return asyncio.run(all_at_once())

    def check(self, prompts: list[Prompt], done: list[Completion]) -> None:
        for prompt, one in zip(prompts, done, strict=True):
            values = expected(*self.plain, prompt, one.token_ids)
            assert list(one.logprobs) == pytest.approx(values, abs=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_transformers(family: str, on_gpu: MakeEngine) -> None:
    vlm = Vlm(family, on_gpu)
    prompts = [vlm.renderer.render(messages) for messages in (TEXT, ONE, ONE, TWO, OTHER, TEXT)]
    for _ in range(2):  # the second time with cached prefixes
        vlm.check(prompts, vlm.sample(prompts))
    graphs: Any = vlm.engine._batch._graphs  # type: ignore[union-attr]
    assert any(kind == "draw" for kind, _ in graphs.captured)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_has_text_alone_after_earlier_images(family: str, on_gpu: MakeEngine) -> None:
    """Its prompt is a captured pass, in which positions follow those of the images."""
    vlm = Vlm(family, on_gpu)
    first = [vlm.renderer.render(messages) for messages in (ONE, TWO)]
    done = vlm.sample(first)
    vlm.check(first, done)
    text = vlm.renderer.render(TEXT).ids
    second = [Prompt(p.ids + one.token_ids + text, p.images) for p, one in zip(first, done, strict=True)]
    vlm.check(second, vlm.sample(second))
    if family in GRIDS:  # in tiles the images are so long that a larger cache was allocated for the second turn
        graphs: Any = vlm.engine._batch._graphs  # type: ignore[union-attr]
        assert any(kind == "prefill" for kind, _ in graphs.captured) and bool(graphs.shift_B.any())


class NoReads(TorchDispatchMode):
    """Refuses what makes the host wait for the GPU, which a graph cannot capture."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        assert function.overloadpacket._qualified_op_name not in (
            *("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select"),
        ), function
        return function(*arguments, **(named or {}))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU captures the passes for real")
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_passes_read_nothing_on_the_host(family: str, on_gpu: MakeEngine) -> None:
    vlm = Vlm(family, on_gpu)
    prompts = [vlm.renderer.render(messages) for messages in (TEXT, ONE)]
    vlm.sample(prompts)
    graphs: Any = vlm.engine._batch._graphs  # type: ignore[union-attr]
    with torch.no_grad(), NoReads():
        for captured in list(graphs.captured.values()):
            captured.replay()
        graphs._prefill(64).replay()
