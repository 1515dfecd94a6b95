"""Half precision on real weights: engine and learner are no further from float32 than transformers' own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from covey.config.schema import LearnerConfig, ModelConfig
from covey.errors import InputError
from covey.learner.learner import Learner
from covey.models.loading import load_policy, open_source
from covey.rollout.embedded import EmbeddedEngine
from covey.rollout.rendering import Renderer
from covey.types import Sample, Sampling
from tests.rollout.plain import alone, answers

QUESTIONS = (
    "Name three rivers of Europe and the seas they flow into.",
    "What is 17 * 23? Explain each step.",
    "Write a short poem about a lighthouse.",
    "Why is the sky blue?",
    "List the planets, from the sun outwards.",
    "How do I make bread without yeast?",
    "Translate 'good morning' into French, Spanish and German.",
    "Sort 9, 2, 7, 4.",
)


def model_in(dtype: str) -> tuple[Any, Any]:
    config = ModelConfig(dtype=dtype)
    source = open_source(config)
    return source, load_policy(source, config)


@pytest.mark.slow
def test_bfloat16_is_as_near_to_float32_as_transformers_is() -> None:
    try:
        source, half = model_in("bfloat16")
    except InputError as error:
        pytest.skip(str(error))
    device = half.get_input_embeddings().weight.device
    renderer = Renderer(source.tokenizer)
    prompts = [renderer.prompt([{"role": "user", "content": text}]) for text in QUESTIONS]
    engine = EmbeddedEngine(half, eos_ids=source.eos_ids(), decode=source.tokenizer.decode)
    requests = [(list(p), Sampling(max_tokens=96, seed=i)) for i, p in enumerate(prompts)]
    done = answers(engine, requests)
    engine.close()
    rows = [
        Sample(tuple(p), d.token_ids, (True,) * len(d.token_ids), d.logprobs, d.versions, 0)
        for (p, _), d in zip(requests, done, strict=True)
    ]
    learner = Learner(half, LearnerConfig(), total_updates=1)
    of_learner = learner.logprobs(rows, 1.0).cpu()
    plain = [alone(half, p, d.token_ids) for (p, _), d in zip(requests, done, strict=True)]
    _, whole = model_in("float32")
    exact = [alone(whole.to(device), p, d.token_ids) for (p, _), d in zip(requests, done, strict=True)]

    def error(found: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([(a.float() - b).abs() for a, b in zip(found, exact, strict=True)])

    of_plain = error(plain)
    of_engine = error([torch.tensor(d.logprobs) for d in done])
    packed = error([of_learner[i, : len(d.token_ids)] for i, d in enumerate(done)])
    print(
        f"\nmean |log-prob − float32's| of {len(of_plain)} tokens: transformers {of_plain.mean():.5f}, "
        f"engine {of_engine.mean():.5f}, learner {packed.mean():.5f}; "
        f"95 %: {of_plain.quantile(0.95):.4f}, {of_engine.quantile(0.95):.4f}, {packed.quantile(0.95):.4f}"
    )
    # The mean over a few hundred tokens varies by some percent, since each is rounded differently.
    for found in (of_engine, packed):
        assert found.mean() <= 1.1 * of_plain.mean()
        assert found.quantile(0.95) <= 1.15 * of_plain.quantile(0.95)
