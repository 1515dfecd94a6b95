"""The packed forward pass against each row alone, for the model families people train."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.algorithms import make
from covey.config.schema import LearnerConfig
from covey.errors import InputError
from covey.learner import forward, logprobs
from covey.learner.learner import Learner
from covey.learner.packing import pack, plan_micro_batches
from covey.learner.parallel import SINGLE_PROCESS
from covey.learner.saving import save_model
from covey.models import families
from covey.models.adapters import with_saved_adapter
from covey.models.loading import set_checkpointing
from covey.rollout.embedded import EmbeddedEngine
from covey.types import Sample, Sampling
from covey.weights.names import named_weights
from tests.conftest import tiny_llama
from tests.learner.helpers import batch_of, rows_of

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


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BY_POSITION = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 6}  # of queries
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {  # of every compared family of the table, by model type
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": False}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        EXPERTS
        | {"shared_expert_intermediate_size": 32}
        | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": 6}),
    "ministral": ("MinistralConfig", {"sliding_window": 6}),
    "ministral3": ("Ministral3Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | BY_POSITION}),
    "gemma": ("GemmaConfig", {}),
    "gemma3_text": (
        "Gemma3TextConfig",
        {"sliding_window": 6, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0, "residual_multiplier": 0.5}),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 3.0}),
    "smollm3": ("SmolLM3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 6}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4": ("Glm4Config", {}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "cohere2": ("Cohere2Config", {"sliding_window": 6}),
    "exaone4": ("Exaone4Config", {"sliding_window": 6}),
    "seed_oss": ("SeedOssConfig", {}),
}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
# Layers and sizes with other names, and views of what attention returns.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", GPT2),
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "ctrl": ("CTRLConfig", GPT2 | {"dff": 64}),
    "gemma3n_text": (
        "Gemma3nTextConfig",
        {
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "laurel_rank": 4},
            **{"num_kv_shared_layers": 0, "sliding_window": 6, "activation_sparsity_pattern": None},
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        },
    ),
    "afmoe": ("AfmoeConfig", EXPERTS | {"num_dense_layers": 1}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
    "jetmoe": ("JetMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8}),
}


def family(name: str, **more: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    make, changes = (CONFIGS | OTHERS)[name]
    settings = {k: v for k, v in SMALL.items() if not (name.startswith("granite") and k == "head_dim")}
    config = getattr(transformers, make)(**(settings | changes | more))
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


FAMILIES = list(CONFIGS)


def test_every_family_of_the_table_is_compared() -> None:
    assert sorted(name for row in families.FAMILIES if row.compared for name in row.model_types) == sorted(CONFIGS)


@torch.no_grad()
def alone(model: Any, row: Sample, temperature: float) -> list[float]:
    logits = model(torch.tensor([row.prompt_ids + row.response_ids])).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits, -1)
    start = len(row.prompt_ids) - 1
    return [
        float(logprobs[start + i, token]) if sampled else 0.0
        for i, (token, sampled) in enumerate(zip(row.response_ids, row.mask, strict=True))
    ]


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_packed_rows_see_what_they_would_see_alone(name: str) -> None:
    model = family(name)
    rows = rows_of(4, 5, gaps=True)
    found = Learner(model, LearnerConfig(micro_batch_tokens=90), total_updates=1).logprobs(rows, 0.7)
    for row, line in zip(rows, found, strict=True):
        expected = alone(model, row, 0.7)
        assert line[: len(expected)].tolist() == pytest.approx(expected, abs=1e-4)
        assert not line[len(expected) :].any()


# Rotary frequencies that are others for rows of more than 16 tokens.
LENGTH_ROPES: dict[str, dict[str, Any]] = {
    "longrope": {
        **{"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0},
        "original_max_position_embeddings": 16,
    },
    "dynamic": {"factor": 4.0},
}


def length_rope_model(kind: str) -> Any:
    rope = {"rope_type": kind, "rope_theta": 1e4} | LENGTH_ROPES[kind]
    return tiny_llama(rope_parameters=rope, max_position_embeddings=64 if kind == "longrope" else 16)


@pytest.mark.parametrize("kind", LENGTH_ROPES)
def test_a_row_that_would_change_the_frequencies_of_others_is_refused(kind: str) -> None:
    model = length_rope_model(kind)
    rows = rows_of(4, 5)
    learner = Learner(model, LearnerConfig(), total_updates=1)
    for row, line in zip(rows, learner.logprobs(rows, 1.0), strict=True):
        assert row.length <= 16
        assert line[: len(row.mask)].tolist() == pytest.approx(alone(model, row, 1.0), abs=1e-4)
    answer = tuple(range(3, 20))
    long = Sample((5, 6), answer, (True,) * len(answer), (-1.0,) * len(answer), (0,) * len(answer), len(rows))
    with pytest.raises(InputError, match=r"a row of 18 tokens: llama models .* rows of at most 16"):
        learner.logprobs([*rows, long], 1.0)


@pytest.mark.parametrize(("name", "noise"), [("gpt2", {}), ("opt", {}), ("mixtral", {"router_jitter_noise": 0.5})])
def test_recomputed_layers_are_without_dropout_and_noise(name: str, noise: dict[str, float]) -> None:
    """Gradient checkpointing needs training mode."""
    model, rows = family(name, **noise), rows_of(4, 2)
    expected = [alone(model, row, 1.0) for row in rows]
    set_checkpointing(model, True)
    found = Learner(model, LearnerConfig(), total_updates=1).logprobs(rows, 1.0)
    for values, line in zip(expected, found, strict=True):
        assert line[: len(values)].tolist() == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "phimoe"])
def test_recomputed_layers_have_no_noise_in_their_routers(name: str) -> None:
    """In training mode Mixtral multiplies the inputs of experts by random numbers, and Phi-3.5-MoE draws experts."""
    model, rows = family(name), rows_of(2, 4)
    for module in model.modules():
        for noise in {"jitter_noise", "input_jitter_noise"} & vars(module).keys():
            setattr(module, noise, 0.3)
    found = []
    for enabled in (False, True):
        set_checkpointing(model, enabled)
        found.append(Learner(model, LearnerConfig(), total_updates=1).logprobs(rows, 1.0))
    torch.testing.assert_close(found[1], found[0], atol=0, rtol=0)


def test_models_that_cannot_recompute_are_refused() -> None:
    with pytest.raises(InputError, match="jetmoe models cannot recompute activations"):
        set_checkpointing(family("jetmoe"), True)


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
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
    with pytest.raises(ValueError, match=r"chunked_attention layers .* yet \(llama\): its attention is local"):
        forward.hidden_states(model, pack(rows, [[0]]))


def test_a_soft_cap_on_attention_is_refused() -> None:
    """transformers' sdpa attention silently ignores it."""
    import transformers as t

    with pytest.raises(InputError, match="soft cap on their attention scores cannot be trained yet \\(gemma2\\)"):
        forward.check_layers(t.Gemma2Config())
    assert forward.check_layers(t.Gemma2Config(attn_logit_softcapping=None)) <= {"full_attention", "sliding_attention"}


@pytest.mark.parametrize(
    ("make", "settings", "reason"),
    [
        ("Qwen3NextConfig", {}, "linear_attention layers .* recurrent layers carry a state"),
        (
            "Lfm2Config",
            {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
            "conv layers .* recurrent layers carry a state",
        ),
        ("Llama4TextConfig", {}, "chunked_attention layers .* local to chunks"),
        ("MambaConfig", {}, "mamba models .* recurrent layers carry a state"),
        ("JambaConfig", {}, "jamba models .* recurrent layers carry a state"),
        ("DeepseekV3Config", {}, "deepseek_v3 models .* keys and values have different sizes"),
        ("LongcatFlashConfig", {}, "longcat_flash models .* keys and values have different sizes"),
        ("DiffLlamaConfig", {}, "diffllama models .* computes attention twice"),
        ("GptOssConfig", {}, "gpt_oss models .* attention has sinks"),
        ("Glm4MoeLiteConfig", {}, "glm4_moe_lite models .* keys and values have different sizes"),
        ("YoutuConfig", {}, "youtu models .* keys and values have different sizes"),
        ("AXK1Config", {}, "axk1 models .* keys and values have different sizes"),
        ("Gemma4TextConfig", {}, "gemma4_text models .* heads of its layers have different sizes"),
        ("MllamaConfig", {}, "mllama models .* attend to images"),
        ("ModernBertDecoderConfig", {}, "modernbert-decoder models .* more layers follow its last hidden states"),
        ("DogeConfig", {}, "doge models .* mask that is computed from its values"),
        ("HrmTextConfig", {}, "hrm_text models .* passes the same layers several times"),
        ("RobertaConfig", {}, "roberta models .* tokens attend to later ones"),
        ("BartConfig", {}, "bart models .* counts positions by itself"),
    ],
)
def test_other_attention_is_refused_with_the_reason(make: str, settings: dict[str, Any], reason: str) -> None:
    import transformers

    with pytest.raises(InputError, match=reason):
        forward.check_layers(getattr(transformers, make)(**settings))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_adapters_of_models_with_experts(name: str, tmp_path: Path) -> None:
    """With adapters on experts where peft adds them, engine and learner agree, and a saved adapter is the same."""
    import peft

    base = family(name)
    plain = copy.deepcopy(base)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    for weight_name, weight in model.named_parameters():
        if "lora_B" in weight_name:
            torch.nn.init.normal_(weight, std=0.1)
    rows = rows_of(3, 3)
    learner = Learner(model, LearnerConfig(), total_updates=1)
    found = learner.logprobs(rows, 1.0)
    for row, line in zip(rows, found, strict=True):
        assert line[: len(row.mask)].tolist() == pytest.approx(alone(model, row, 1.0), abs=1e-4)
    engine = EmbeddedEngine(model, eos_ids=[2], decode=str)
    done = asyncio.run(engine.generate(rows[0].prompt_ids, Sampling(max_tokens=8)))
    row = Sample(rows[0].prompt_ids, done.token_ids, (True,) * len(done.token_ids), done.logprobs, done.versions, 0)
    assert alone(model, row, 1.0) == pytest.approx(done.logprobs, abs=1e-4)
    model.save_pretrained(tmp_path)
    again = with_saved_adapter(plain, tmp_path)
    assert torch.equal(Learner(again, LearnerConfig(), total_updates=1).logprobs(rows, 1.0), found)
    if name == "qwen2_moe":  # peft leaves its experts alone, so its adapters can be merged for vLLM
        assert dict(named_weights(model)).keys() == dict(named_weights(family(name))).keys()
    else:
        with pytest.raises(InputError, match="adapter on fused experts cannot be merged"):
            dict(named_weights(model))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "granitemoe"])
def test_updates_of_models_with_experts(name: str, tmp_path: Path) -> None:
    """An update moves experts and routers, whatever the split into micro-batches, and the model's folder has the names
    of the hub, one tensor per expert where they have one."""
    rows, results = rows_of(2, 4), []
    for size in (None, 3):
        model = family(name)  # in float32: torch multiplies experts in no higher precision
        learner = Learner(model, LearnerConfig(lr=1e-2, eps=0.1, micro_batch_size=size), total_updates=1)
        learner.update(batch_of(rows, 4, dtype=torch.float32), make("grpo"))
        results.append(learner.logprobs(rows, 1.0))
    torch.testing.assert_close(*results, atol=1e-4, rtol=0)
    before, after = dict(family(name).named_parameters()), dict(model.named_parameters())
    moved = [key for key in before if not torch.equal(before[key], after[key])]
    assert any("experts" in key for key in moved) and any("gate.weight" in key or "router" in key for key in moved)
    save_model(model, tmp_path / "model", SINGLE_PROCESS, sharded=False)
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(weight, after[key]) for key, weight in loaded.named_parameters())
