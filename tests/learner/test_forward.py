"""The packed forward pass against each row alone, for the model families people train."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from covey.config.schema import LearnerConfig
from covey.errors import InputError
from covey.learner import forward, logprobs
from covey.learner.learner import Learner
from covey.learner.packing import pack, plan_micro_batches
from covey.rollout.embedded import EmbeddedEngine
from covey.types import Sample, Sampling
from tests.conftest import tiny_llama
from tests.learner.helpers import rows_of

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def family(name: str) -> Any:
    import transformers as t

    torch.manual_seed(0)
    configs: dict[str, Any] = {
        "llama": (t.LlamaConfig, {}),
        "qwen2": (t.Qwen2Config, {"use_sliding_window": False}),
        "qwen3": (t.Qwen3Config, {}),
        "mistral": (t.MistralConfig, {"sliding_window": 6}),
        "gemma3": (
            t.Gemma3TextConfig,
            {"sliding_window": 6, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
        ),
        "granite": (t.GraniteConfig, {"logits_scaling": 3.0, "residual_multiplier": 0.5}),
        "smollm3": (t.SmolLM3Config, {}),
    }
    make, changes = configs[name]
    settings = {k: v for k, v in SMALL.items() if not (name == "granite" and k == "head_dim")}
    return t.AutoModelForCausalLM.from_config(make(**(settings | changes)), attn_implementation="sdpa").eval()


FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma3", "granite", "smollm3"]


@torch.no_grad()
def alone(model: Any, row: Sample, temperature: float) -> list[float]:
    logits = model(torch.tensor([row.prompt_ids + row.response_ids])).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits, -1)
    start = len(row.prompt_ids) - 1
    return [
        float(logprobs[start + i, token]) if sampled else 0.0
        for i, (token, sampled) in enumerate(zip(row.response_ids, row.mask, strict=True))
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_rows_see_what_they_would_see_alone(name: str) -> None:
    model = family(name)
    rows = rows_of(4, 5, gaps=True)
    found = Learner(model, LearnerConfig(micro_batch_tokens=90), total_updates=1).logprobs(rows, 0.7)
    for row, line in zip(rows, found, strict=True):
        expected = alone(model, row, 0.7)
        assert line[: len(expected)].tolist() == pytest.approx(expected, abs=1e-4)
        assert not line[len(expected) :].any()


@pytest.mark.parametrize("name", FAMILIES)
def test_engine_and_learner_agree(name: str) -> None:
    """Log-probs of the engine equal the learner's, so the ratio starts at one."""
    model = family(name)
    engine = EmbeddedEngine(model, eos_ids=[2], decode=str)
    prompts = [row.prompt_ids for row in rows_of(5, 1)] * 3

    async def all_at_once() -> list[Any]:
        jobs = [engine.generate(p, Sampling(temperature=0.8, max_tokens=14, seed=s)) for s, p in enumerate(prompts)]
        return await asyncio.gather(*jobs)

    done = asyncio.run(all_at_once())
    rows = [
        Sample(p, d.token_ids, (True,) * len(d.token_ids), d.logprobs, d.versions, i)
        for i, (p, d) in enumerate(zip(prompts, done, strict=True))
    ]
    found = Learner(model, LearnerConfig(), total_updates=1).logprobs(rows, 0.8)
    for row, line in zip(rows, found, strict=True):
        assert line[: len(row.logprobs)].tolist() == pytest.approx(row.logprobs, abs=1e-4)


def test_entropy_by_hand_and_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    rows = rows_of(2, 3)
    packed = pack(rows, plan_micro_batches(rows, 1000)[0][0])

    def fragments(entropy_gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = forward.hidden_states(model, packed)
        return forward.token_logprobs(model, hidden, packed.target_M, 1.0, entropy_gradient=entropy_gradient)[:2]

    chosen, entropy = fragments()
    row = rows[0]
    with torch.no_grad():
        logits = model(torch.tensor([row.prompt_ids + row.response_ids])).logits[0, len(row.prompt_ids) - 1]
    p = torch.softmax(logits, -1)
    place = int(((packed.row_M == 0) & (packed.column_M == 0)).nonzero()[0])
    first = plan_micro_batches(rows, 1000)[0][0][0][0]
    if first == 0:
        assert float(entropy[place].detach()) == pytest.approx(float(-(p * p.log()).sum()), abs=1e-5)
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 64 * 4)
    again, entropy_again = fragments()
    torch.testing.assert_close(again, chosen)
    torch.testing.assert_close(entropy_again, entropy)
    weights = torch.randn(len(chosen))
    gradients = []
    for chunk in (64 * 4, 10**9):
        monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk)
        model.zero_grad()
        (fragments(entropy_gradient=True)[0] * weights).sum().backward()
        gradients.append(model.lm_head.weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_gradient_of_logprob_and_entropy(entropy_gradient: bool) -> None:
    """Against autograd's own derivative of log_softmax."""
    torch.manual_seed(0)
    logits = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    target, u, v = torch.randint(9, (6,)), torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    chosen, entropy = logprobs.ChosenLogProb.apply(logits, target, entropy_gradient)
    plain = torch.log_softmax(logits, -1)
    expected_entropy = -(plain.exp() * plain).sum(-1)
    torch.testing.assert_close(chosen, plain.gather(-1, target[:, None])[:, 0])
    torch.testing.assert_close(entropy, expected_entropy)
    assert entropy.requires_grad == entropy_gradient
    (found,) = torch.autograd.grad((u * chosen).sum() + (v * entropy).sum() * entropy_gradient, logits)
    loss = (u * plain.gather(-1, target[:, None])[:, 0]).sum() + (v * expected_entropy).sum() * entropy_gradient
    (expected,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, expected)


def test_full_kl_and_its_gradient() -> None:
    """Against the sum over the vocabulary written out, differentiated by autograd."""
    torch.manual_seed(0)
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    ref, weight = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    p, q = torch.log_softmax(logits, -1), torch.log_softmax(ref, -1)
    expected = (p.exp() * (p - q)).sum(-1)
    found = logprobs.FullKl.apply(logits, ref)
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad((weight * found).sum(), logits)
    (by_hand,) = torch.autograd.grad((weight * expected).sum(), logits)
    torch.testing.assert_close(gradient, by_hand)
    assert float(logprobs.FullKl.apply(ref, ref).abs().max()) < 1e-12


def test_unsupported_layers_are_refused_by_name() -> None:
    model = tiny_llama()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    rows = rows_of(1, 1)
    with pytest.raises(ValueError, match="chunked_attention"):
        forward.hidden_states(model, pack(rows, [[0]]))


def test_a_soft_cap_on_attention_is_refused() -> None:
    """transformers' sdpa attention silently ignores it."""
    import transformers as t

    with pytest.raises(InputError, match="soft cap on their attention scores cannot be trained yet \\(gemma2\\)"):
        forward.check_layers(t.Gemma2Config())
    assert forward.check_layers(t.Gemma2Config(attn_logit_softcapping=None)) <= {"full_attention", "sliding_attention"}
