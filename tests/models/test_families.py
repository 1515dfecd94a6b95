"""The table of model families: its rows name classes and formats that exist."""

from __future__ import annotations

import importlib
import importlib.util
import math
from typing import Any

import peft
import pytest
import torch

from covey.agents.formats.detect import FORMATS
from covey.models.families import (
    FAMILIES,
    FUSED_ATTENTION,
    FUSED_MLP,
    LOGIT_TRANSFORMS,
    TOOL_CALLS,
    Family,
    decoder,
    layers_of,
)
from tests.conftest import ROOT
from tests.learner.jobs import tiny_gemma3
from tests.learner.test_forward import family as family_model
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


def test_tool_call_formats_exist() -> None:
    assert set(TOOL_CALLS.values()) <= set(FORMATS)
    assert TOOL_CALLS["mixtral"] == "mistral" and "qwen2" not in TOOL_CALLS


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("logits_scaling", 1.5), ("logit_scale", 6.0), ("final_logit_softcapping", 2 * math.tanh(1.5))],
)
def test_logit_transforms_by_hand(setting: str, expected: float) -> None:
    assert LOGIT_TRANSFORMS[setting](torch.tensor(3.0), 2.0).item() == pytest.approx(expected)
