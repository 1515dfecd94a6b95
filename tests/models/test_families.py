"""The table of model families: its rows name classes and formats that exist."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from covey.agents.formats.detect import FORMATS
from covey.config.schema import LearnerConfig, LoraConfig, ModelConfig
from covey.errors import InputError
from covey.learner.forward import check_layers
from covey.learner.learner import Learner
from covey.models.families import (
    FAMILIES,
    FUSED_ATTENTION,
    FUSED_MLP,
    LOGIT_TRANSFORMS,
    REFUSED,
    TOOL_CALLS,
    Family,
    causal_lm,
    decoder,
    layers_of,
)
from covey.models.folder import explain_errors
from covey.models.loading import load_policy, open_source, set_checkpointing
from covey.types import Sampling
from tests.conftest import ROOT, byte_tokenizer
from tests.learner.helpers import rows_of
from tests.learner.jobs import tiny_gemma3
from tests.learner.test_forward import alone
from tests.learner.test_forward import family as family_model
from tests.rollout.plain import Request, answers, assert_as_alone, engine_for
from tests.vision.tiny import tiny_vlm


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.fused], ids=lambda family: family.fused)
def test_fused_layers_are_classes_of_transformers(family: Family) -> None:
    (model_type,) = family.model_types
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    for name in (f"{family.fused}Attention", f"{family.fused}MLP"):
        assert name in FUSED_ATTENTION + FUSED_MLP
        assert issubclass(getattr(module, name), torch.nn.Module)


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("models_table", ROOT / "tools/models_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_on_the_page_is_that_of_the_code(tool: Any) -> None:
    text = tool.PAGE.read_text(encoding="utf-8")
    assert "| `qwen3_moe`* | yes |" in text and tool.with_table(text) == text


@pytest.mark.parametrize("name", [name for row in FAMILIES if row.experts for name in row.model_types])
def test_the_modules_of_a_mixture_that_get_adapters(tool: Any, name: str) -> None:
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(family_model(name), config)
    adapted = {key.partition(".lora_A")[0] for key, _ in model.named_parameters() if "lora_A" in key}
    kinds = {
        "attention": any("self_attn" in key for key in adapted),
        "router": any(key.endswith((".gate", ".router")) for key in adapted),
        "experts": any(".experts" in key for key in adapted),
        "shared experts": any(".shared_expert" in key for key in adapted),
    }
    assert ", ".join(kind for kind, found in kinds.items() if found) == tool.LORA[name]


def test_the_layers_of_a_model_with_a_vision_tower_are_those_of_its_language_model() -> None:
    text, qwen, smol = tiny_gemma3(0, torch.float32), tiny_vlm("qwen2_5_vl")[0], tiny_vlm("smolvlm")[0]
    assert layers_of(decoder(text)) == list(text.model.language_model.layers)
    assert layers_of(decoder(qwen)) == list(qwen.model.language_model.layers)
    assert layers_of(decoder(smol)) == list(smol.model.text_model.layers)


# Sizes of small models, under the names that configurations have for them. Windows are shorter than the rows.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embed_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dff", "decoder_ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("swa_num_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_num_experts", "top_k_experts"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "rotary_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers", "max_window_layers"), 1),
    **dict.fromkeys(("n_shared_experts", "bos_token_id"), 1),
    **dict.fromkeys(("pad_token_id", "eos_token_id"), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96),
    **{"sliding_window": 6, "use_sliding_window": True, "initializer_range": 0.3},
    **{"laurel_rank": 4, "num_kv_shared_layers": 1, "activation_sparsity_pattern": None},
}
TEXT = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
TEXT |= {key: SIZES[key] for key in ("num_key_value_heads", "head_dim", "vocab_size", "initializer_range")}
IMAGES = {"vision_config": {**TEXT, "image_size": 16, "patch_size": 8}, "mm_tokens_per_image": 4}
NESTED: dict[str, dict[str, Any]] = {  # the language model's sizes are in a configuration of its own
    "emu3": {"text_config": TEXT | {"pad_token_id": 2}},
    "fuyu": {"text_config": TEXT},
    "gemma3": {"text_config": TEXT | {"sliding_window": 6}} | IMAGES,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
NOT_BUILT = {  # families of which no small model can be made here
    **dict.fromkeys(("blt", "dbrx", "cohere_compass_text", "musicgen", "musicgen_melody"), "sizes in nested parts"),
    **dict.fromkeys(("moss_transcribe_diarize", "phi4_multimodal"), "an encoder of sound of a fixed size"),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "an assistant of another model"),
    "gemma3n": "its vision tower needs timm",
}
OTHERS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - REFUSED.keys() - NOT_BUILT.keys())


def small_config(name: str) -> Any:
    kind = CONFIG_MAPPING[name]
    if name in NESTED:
        return kind(**NESTED[name])
    known = {*vars(kind()), *kind.attribute_map}
    fits = {key: value for key, value in SIZES.items() if key in known and kind.attribute_map.get(key) not in SIZES}
    return kind(**fits | SPECIAL.get(name, {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_transformers_is_exact_or_refused(name: str, tmp_path: Path) -> None:
    """Loaded as a run loads it: the learner's log-probs of packed rows and of one row, without and with an adapter, and
    those of the engine, are those of transformers' own forward pass over each row alone."""
    torch.manual_seed(0)
    try:
        config = small_config(name)
        check_layers(config)
        with explain_errors(name):
            AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").save_pretrained(tmp_path)
        byte_tokenizer().save_pretrained(tmp_path)
        loaded = ModelConfig(name=str(tmp_path), dtype="float32", device="cpu")
        model = load_policy(open_source(loaded), loaded)
        assert_exact(model)
        adapted = replace(loaded, lora=LoraConfig(rank=2))
        model = load_policy(open_source(adapted), adapted)
        for key, weight in model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(weight, std=0.1)
        assert_exact(model)
    except InputError as error:
        reasons = "cannot be trained|computes attention on its own|transformers has no emu3_text_model"
        assert re.search(reasons, str(error)), error


def assert_exact(model: Any) -> None:
    rows = rows_of(3, 4, gaps=True)
    expected = [alone(model, row, 0.7) for row in rows]
    learner = Learner(model, LearnerConfig(), total_updates=1)
    found = [*learner.logprobs(rows, 0.7), *learner.logprobs(rows[:1], 0.7)]
    if causal_lm(model).supports_gradient_checkpointing:  # in training mode
        set_checkpointing(model, True)
        found += learner.logprobs(rows, 0.7)
        set_checkpointing(model, False)
    for line, logprobs in zip(found, cycle([*expected, expected[0]])):
        assert line[: len(logprobs)].tolist() == pytest.approx(logprobs, abs=1e-4)
    requests: list[Request] = [([*row.prompt_ids], Sampling(max_tokens=14, seed=row.episode)) for row in rows[::3]]
    assert_as_alone(model, requests, answers(engine_for(model, eos_ids=[]), requests))


def test_tool_call_formats_exist() -> None:
    assert set(TOOL_CALLS.values()) <= set(FORMATS)
    assert TOOL_CALLS["mixtral"] == "mistral" and "qwen2" not in TOOL_CALLS


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("logits_scaling", 1.5), ("logit_scale", 6.0), ("final_logit_softcapping", 2 * math.tanh(1.5))],
)
def test_logit_transforms_by_hand(setting: str, expected: float) -> None:
    assert LOGIT_TRANSFORMS[setting](torch.tensor(3.0), 2.0).item() == pytest.approx(expected)
