"""The engine's log-probs, the learner's and transformers' own agree, for every family, with one and with two images."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithms.assemble import make
from covey.config.schema import LearnerConfig
from covey.learner.learner import Learner
from covey.learner.packing import pack
from covey.models.image_features import vision_weights
from covey.models.vision import VisionProcessor
from covey.rollout.embedded import EmbeddedEngine
from covey.rollout.rendering import Renderer
from covey.types import Completion, ImageSpan, Prompt, Sample, Sampling, StopReason
from tests.learner.helpers import batch_of
from tests.vision.tiny import FAMILIES, GRIDS, TWIN, an_image, asking, tiny_vlm

ONE = asking("what is ", an_image(24, 16, 1), "?")
TWO = asking("which of ", an_image(24, 16, 1), " and ", an_image(16, 40, 2), " is red?")
OTHER = asking("what is ", an_image(24, 16, 3), "?")  # the same ids as ONE
TEXT = [{"role": "user", "content": "no picture at all"}]


def engine_for(model: Any, vision: VisionProcessor, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(model, eos_ids=[2], decode=vision.tokenizer.decode, vision=vision, eager=True, **options)


def sample(engine: EmbeddedEngine, prompts: list[Prompt], attempts: int = 2) -> list[tuple[Prompt, Completion]]:
    """Ragged completions of a group for each prompt."""

    async def all_at_once() -> list[Completion]:
        jobs = []
        for number, prompt in enumerate(prompts):
            for attempt in range(attempts):
                sampling = Sampling(temperature=0.9, max_tokens=3 + 4 * attempt, seed=10 * number + attempt)
                jobs.append(engine.generate(prompt.ids, sampling, prompt.images))
        return list(await asyncio.gather(*jobs))

    repeated = [prompt for prompt in prompts for _ in range(attempts)]
    return list(zip(repeated, asyncio.run(all_at_once()), strict=True))


def row_of(prompt: Prompt, done: Completion, episode: int) -> Sample:
    mask = (True,) * len(done.token_ids)
    return Sample(prompt.ids, done.token_ids, mask, done.logprobs, done.versions, episode, prompt.images)


@torch.no_grad()
def by_transformers(model: Any, vision: VisionProcessor, ids: tuple[int, ...], images: tuple[ImageSpan, ...]) -> Tensor:
    """Logits of the model's own forward pass, which finds images and positions by itself."""
    ids_1T = torch.tensor(ids)[None]
    inputs: dict[str, Any] = vision.stacked([span.image for span in images]) if images else {}
    if images and vision.family.grid:
        inputs["mm_token_type_ids"] = (ids_1T == vision.token_id).int()
    logits: Tensor = model(input_ids=ids_1T, **inputs).logits[0]
    return logits


def expected(model: Any, vision: VisionProcessor, prompt: Prompt, completion: tuple[int, ...]) -> list[float]:
    # transformers would take a sampled image token for an image, so it gets another token with the same embedding.
    twin = vision.tokenizer.convert_tokens_to_ids(TWIN)
    fed = tuple(twin if token == vision.token_id else token for token in completion)
    logits = by_transformers(model, vision, prompt.ids + fed, prompt.images)[len(prompt.ids) - 1 : -1] / 0.9
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_learner_and_transformers_agree(family: str, paged: bool) -> None:
    model, vision = tiny_vlm(family)
    renderer = Renderer(vision.tokenizer, vision=vision)
    prompts = [renderer.render(messages) for messages in (ONE, TWO, TEXT, OTHER)]
    assert prompts[0].ids == prompts[3].ids
    engine = engine_for(model, vision, paged=paged)
    done = sample(engine, prompts)
    engine.close()
    for prompt, one in done:
        assert list(one.logprobs) == pytest.approx(expected(model, vision, prompt, one.token_ids), abs=1e-4)
    rows = [row_of(prompt, one, number) for number, (prompt, one) in enumerate(done)]
    learner = Learner(model, LearnerConfig(), total_updates=1, vision=vision)
    for some in (rows, [row for row in rows if not row.images]):  # a batch without images takes another path
        for row, logprobs in zip(some, learner.logprobs(some, 0.9), strict=True):
            assert logprobs[: len(row.response_ids)].tolist() == pytest.approx(row.logprobs, abs=1e-4)


@pytest.mark.parametrize("paged", [False, True])
def test_equal_ids_with_different_images_share_nothing(paged: bool) -> None:
    model, vision = tiny_vlm("qwen2_5_vl")
    renderer = Renderer(vision.tokenizer, vision=vision)
    prompts = [renderer.render(messages) for messages in (ONE, OTHER)]
    engine = engine_for(model, vision, paged=paged)
    first = sample(engine, prompts[:1], 1)[0][1]
    second = sample(engine, prompts[1:], 1)[0][1]  # the first one's prefix is in the cache now
    engine.close()
    assert first.logprobs[0] == pytest.approx(expected(model, vision, prompts[0], first.token_ids)[0], abs=1e-5)
    assert second.logprobs[0] == pytest.approx(expected(model, vision, prompts[1], second.token_ids)[0], abs=1e-5)
    assert abs(expected(model, vision, prompts[1], first.token_ids)[0] - first.logprobs[0]) > 1e-3


def test_an_image_is_encoded_once_for_its_group_and_for_other_prompts() -> None:
    model, vision = tiny_vlm("qwen2_5_vl")
    renderer = Renderer(vision.tokenizer, vision=vision)
    engine = engine_for(model, vision)
    sample(engine, [renderer.render(ONE), renderer.render(TWO)], attempts=4)
    assert engine._features is not None and engine._features.encoded == 2
    asyncio.run(engine.publish(model, 1))  # every weight is trained here, those of the vision tower too
    sample(engine, [renderer.render(ONE)], attempts=4)
    assert engine._features.encoded == 3
    for weight in vision_weights(model).values():
        weight.requires_grad_(False)
    asyncio.run(engine.publish(model, 2))  # features do not change
    sample(engine, [renderer.render(ONE)], attempts=4)
    assert engine._features.encoded == 3
    engine.close()


@pytest.mark.parametrize("paged", [False, True])
def test_a_prefix_may_end_in_the_middle_of_an_image(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill in passes of seven tokens, so that images are computed piece by piece."""
    from covey.rollout.embedded import runner

    monkeypatch.setattr(runner, "PREFILL_TOKENS", 7)
    model, vision = tiny_vlm("qwen3_vl")
    prompt = Renderer(vision.tokenizer, vision=vision).render(TWO)
    engine = engine_for(model, vision, paged=paged)
    for _, one in sample(engine, [prompt]):
        assert list(one.logprobs) == pytest.approx(expected(model, vision, prompt, one.token_ids), abs=1e-4)
    engine.close()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_a_sampled_image_token_is_a_token_like_any_other(family: str) -> None:
    """Its embedding is used, as transformers does when it generates; the features stay where the images are."""
    model, vision = tiny_vlm(family)
    prompt = Renderer(vision.tokenizer, vision=vision).render(ONE)
    learner = Learner(model, LearnerConfig(), total_updates=1, vision=vision)

    def logprobs(answer: tuple[int, ...]) -> Tensor:
        done = Completion(answer, (0.0,) * len(answer), (0,) * len(answer), StopReason.EOS)
        return learner.logprobs([row_of(prompt, done, 0)], 1.0)[0]

    twin = vision.tokenizer.convert_tokens_to_ids(TWIN)
    torch.testing.assert_close(logprobs((5, vision.token_id, 7))[2], logprobs((5, twin, 7))[2])


# -- The learner -------------------------------------------------------------------------------------------------------


def answers(prompt: Prompt, count: int, seed: int) -> list[Sample]:
    """Ragged answers; the second one's are those of two turns, with a picture in between."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        ids = tuple(torch.randint(3, 60, (2 + 3 * number,), generator=generator).tolist())
        done = Completion(ids, (-3.6,) * len(ids), (0,) * len(ids), StopReason.EOS)
        rows.append(row_of(prompt, done, number))
    return rows


def with_a_picture_in_the_answer(row: Sample, prompt: Prompt) -> Sample:
    """The row, then a further user turn with a picture, then two sampled tokens."""
    gap = row.length
    images = tuple(replace(span, start=span.start + gap) for span in prompt.images)
    ids = (*row.response_ids, *prompt.ids, 5, 9)
    mask = (*row.mask, *(False,) * len(prompt.ids), True, True)
    logprobs = tuple(-3.6 * on for on in mask)
    return replace(
        row, response_ids=ids, mask=mask, logprobs=logprobs, versions=(0,) * len(ids), images=row.images + images
    )


def a_batch(vision: VisionProcessor) -> list[Sample]:
    renderer = Renderer(vision.tokenizer, vision=vision)
    prompts = [renderer.render(messages) for messages in (ONE, TWO, OTHER)]
    rows = [row for number, prompt in enumerate(prompts) for row in answers(prompt, 3, number)]
    rows[4] = with_a_picture_in_the_answer(rows[4], renderer.render(OTHER))
    return [replace(row, episode=number) for number, row in enumerate(rows)]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_do_not_depend_on_the_split_into_micro_batches(family: str) -> None:
    """In float64, with the vision tower trained: GVPO, which couples the members of a group."""
    gradients = []
    for tokens in (10_000, 150, 1):
        model, vision = tiny_vlm(family, dtype=torch.float64)
        rows = a_batch(vision)
        learner = Learner(
            model, LearnerConfig(lr=0.0, grad_clip=0.0, micro_batch_tokens=tokens), total_updates=1, vision=vision
        )
        gradients.append(gradients_of(learner, rows, "gvpo"))
    assert any("visual" in name or "vision_model" in name for name in gradients[0])
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-6, msg=name)
    assert max(float(gradient.abs().max()) for gradient in gradients[0].values()) > 1e-3


def gradients_of(learner: Learner, rows: list[Sample], algorithm: str) -> dict[str, Tensor]:
    """The gradients of an update, in place of the update."""
    found: dict[str, Tensor] = {}

    def collect() -> tuple[float, float, bool]:
        found.update({n: p.grad.clone() for n, p in learner.model.named_parameters() if p.grad is not None})
        return 0.0, 0.0, True

    learner.optimizer.step = collect  # type: ignore[method-assign]
    learner.update(batch_of(rows, 3), make(algorithm))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_batch_gives_the_log_probs_of_plain_forward_passes(family: str) -> None:
    """Also for a picture that came between two sampled answers."""
    model, vision = tiny_vlm(family, dtype=torch.float64)
    rows = a_batch(vision)
    learner = Learner(model, LearnerConfig(), total_updates=1, vision=vision)
    for row, logprobs in zip(rows, learner.logprobs(rows, 1.0), strict=True):
        ids = row.prompt_ids + row.response_ids
        logits = by_transformers(model, vision, ids, row.images)[len(row.prompt_ids) - 1 : -1]
        plain = logits.log_softmax(-1).gather(-1, torch.tensor(row.response_ids)[:, None])[:, 0]
        mask = torch.tensor(row.mask)
        torch.testing.assert_close(logprobs[: len(mask)][mask], plain[mask], atol=1e-9, rtol=0)


def test_an_image_of_several_prompts_is_encoded_once_per_micro_batch() -> None:
    _, vision = tiny_vlm("qwen2_5_vl")
    rows = a_batch(vision)
    packed = pack(rows, [[0, 1, 2], [3, 4, 5], [6, 7, 8]], vision)
    assert packed.images is not None and packed.pixels is not None
    assert len(packed.images.images) == 3 == len(packed.pixels["image_grid_thw"])


def test_a_frozen_vision_tower_gets_no_gradient_and_the_language_model_the_same() -> None:
    gradients = []
    for frozen in (False, True):
        model, vision = tiny_vlm("qwen2_5_vl", dtype=torch.float64)
        for weight in vision_weights(model).values():
            weight.requires_grad_(not frozen)
        learner = Learner(model, LearnerConfig(grad_clip=0.0), total_updates=1, vision=vision)
        gradients.append(gradients_of(learner, a_batch(vision), "grpo"))
    trained, frozen_too = gradients
    assert not any("visual" in name for name in frozen_too) and any("visual" in name for name in trained)
    for name, gradient in frozen_too.items():
        torch.testing.assert_close(gradient, trained[name])


def test_grids_have_positions_and_tiles_have_none() -> None:
    for family in FAMILIES:
        _, vision = tiny_vlm(family)
        prompt = Renderer(vision.tokenizer, vision=vision).render(ONE)
        assert [span.grid for span in prompt.images] == ([(2, 3)] if family in GRIDS else [None])
