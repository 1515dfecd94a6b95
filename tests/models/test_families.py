"""The table of model families: its rows name classes and formats that exist."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

from covey.agents.formats.detect import FORMATS
from covey.models.families import FAMILIES, FUSED_ATTENTION, FUSED_MLP, LOGIT_TRANSFORMS, TOOL_CALLS, Family


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.fused], ids=lambda family: family.fused)
def test_fused_layers_are_classes_of_transformers(family: Family) -> None:
    (model_type,) = family.model_types
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    for name in (f"{family.fused}Attention", f"{family.fused}MLP"):
        assert name in FUSED_ATTENTION + FUSED_MLP
        assert issubclass(getattr(module, name), torch.nn.Module)


def test_tool_call_formats_exist() -> None:
    assert set(TOOL_CALLS.values()) <= set(FORMATS)
    assert TOOL_CALLS["mixtral"] == "mistral" and "qwen2" not in TOOL_CALLS


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("logits_scaling", 1.5), ("logit_scale", 6.0), ("final_logit_softcapping", 2 * math.tanh(1.5))],
)
def test_logit_transforms_by_hand(setting: str, expected: float) -> None:
    assert LOGIT_TRANSFORMS[setting](torch.tensor(3.0), 2.0).item() == pytest.approx(expected)
