"""Vision-language models in vLLM itself, tiny and random: `make vllm`. On a GPU if there is one."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.models.vision import VisionProcessor
from covey.rollout.rendering import Renderer
from covey.rollout.vllm import VisionSettings, VllmEngine, VllmSettings
from covey.types import Completion, Prompt, Sampling
from tests.vision.test_engine_and_learner import ONE, OTHER, TEXT, TWO, expected
from tests.vision.tiny import GRIDS, an_image, asking, tiny_vlm

for package in ("vllm", "torchvision"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed here: make vllm", allow_module_level=True)

GPU = torch.cuda.is_available()
TOLERANCE = 1e-2 if GPU else 1e-3
LARGE = asking("what is ", an_image(64, 48, 5), "?")  # 64 × 48 pixels: more than the limit


class Bench:
    """One engine for a family, whose start takes most of the time."""

    def __init__(self, family: str, folder: Path) -> None:
        self.model, self.vision = tiny_vlm(family, width=128)
        self.model.save_pretrained(folder)
        self.vision.tokenizer.save_pretrained(folder)
        self.vision.save_pretrained(folder)
        self.engine = VllmEngine(
            VllmSettings(
                str(folder),
                eos_ids=(2,),
                devices=(0,) if GPU else (),
                context_length=1024,
                max_sequences=16,
                memory=0.05,
                eager=True,
                vision=VisionSettings.of(self.vision, trained=True),
            ),
            log=folder / "vllm.log",
            vision=self.vision,
        )
        self.loop = asyncio.new_event_loop()
        self.version = 0

    def publish(self) -> None:
        self.version += 1
        self.loop.run_until_complete(self.engine.publish(self.model, self.version))

    def sample(self, prompts: list[Prompt]) -> list[Completion]:
        async def all_at_once() -> list[Completion]:
            samplings = (Sampling(0.9, max_tokens=4 + 3 * (n % 3), seed=n) for n in range(len(prompts)))
            jobs = (self.engine.generate(p.ids, s, p.images) for p, s in zip(prompts, samplings, strict=True))
            return list(await asyncio.gather(*jobs))

        return self.loop.run_until_complete(all_at_once())

    def check(self, prompts: list[Prompt]) -> list[Completion]:
        done = self.sample(prompts)
        for prompt, one in zip(prompts, done, strict=True):
            values = expected(self.model, self.vision, prompt, one.token_ids)
            assert list(one.logprobs) == pytest.approx(values, abs=TOLERANCE)
        return done


@pytest.fixture(scope="module", params=GRIDS)
def bench(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(request.param, tmp_path_factory.mktemp(request.param))
    yield bench
    bench.engine.close()
    bench.loop.close()


def test_log_probs_are_those_of_transformers(bench: Bench) -> None:
    bench.publish()
    renderer = Renderer(bench.vision.tokenizer, vision=bench.vision)
    bench.check([renderer.render(messages) for messages in (ONE, TWO, TEXT, OTHER, ONE, LARGE)])


def test_a_next_turn_and_new_weights_of_the_tower(bench: Bench) -> None:
    """Neither prefixes nor features of images stay after an update."""
    bench.publish()
    renderer = Renderer(bench.vision.tokenizer, vision=bench.vision)
    first = [renderer.render(messages) for messages in (ONE, TWO)]
    text = renderer.render(TEXT).ids
    done = bench.check(first)
    bench.check([Prompt(p.ids + one.token_ids + text, p.images) for p, one in zip(first, done, strict=True)])
    with torch.no_grad():
        for weight in bench.model.parameters():
            weight.mul_(1.1)
    before = [one.logprobs[0] for one in done]
    bench.publish()
    after = [one.logprobs[0] for one in bench.check(first)]
    assert all(abs(a - b) > TOLERANCE for a, b in zip(after, before, strict=True))


def test_an_image_that_vllm_shows_otherwise_fails_its_request(bench: Bench) -> None:
    processor: VisionProcessor = bench.vision
    prompt = Renderer(processor.tokenizer, vision=processor).render(ONE)
    (span,) = prompt.images
    shorter = replace(span, length=span.length - 1)
    ids = (*prompt.ids[: shorter.end], *prompt.ids[span.end :])
    with pytest.raises(Exception, match="other tokens than the learner's"):
        bench.sample([Prompt(ids, (shorter,))])
