"""Quantised state through bitsandbytes: base weights in 4 bits (QLoRA), and moments of AdamW in 8 bits.

QLoRA (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314): the base model's matrices are stored as NF4 in blocks of
64 weights, with doubly quantised scales, and dequantised to the model's precision for each product. Adapters are
trained beside them. Embedding, norms and output matrix stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from covey.config.schema import Config, ModelConfig
from covey.errors import InputError
from covey.imports import require


def require_bitsandbytes(setting: str) -> Any:
    return require("bitsandbytes", "quantization", f"{setting} needs bitsandbytes")


def load_options(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Options of `from_pretrained`: quantised weights are made on their device."""
    if config.quantization is None:
        return {}
    require_bitsandbytes(f"model.quantization={config.quantization}")
    from transformers import BitsAndBytesConfig

    return {
        "device_map": {"": device},
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=config.quantization,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant=True,
        ),
    }


def keep_format(model: Any) -> None:
    """Keep bitsandbytes from repacking weights in a forward pass without gradient on a CPU: its product of repacked
    weights rounds to bfloat16 and has no gradient, also in later passes that need one."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def is_quantized(weight: Any) -> bool:
    return hasattr(weight, "quant_state")


def check_quantization(config: Config, *, adapter: bool) -> None:
    """Refuse settings that quantised weights cannot be used with, before anything is loaded. `adapter`: the model is
    one."""
    kind = config.model.quantization
    if kind is None:
        return
    require_bitsandbytes(f"model.quantization={kind}")
    if config.model.lora.rank == 0 and not adapter:
        raise InputError(
            f"model.quantization={kind}: 4-bit weights have no gradient, so they cannot be trained\n"
            "  train an adapter beside them: model.lora.rank=16"
        )
    if config.rollout.name == "vllm":
        raise InputError(
            f"model.quantization={kind} with rollout=vllm: adapters cannot be merged into 4-bit weights without "
            "rounding\n  use rollout=embedded, which samples with the learner's own module"
        )
    if config.learner.parallel == "fsdp" or config.learner.tensor_parallel > 1:
        raise InputError(
            f"model.quantization={kind}: the blocks of 4-bit weights cannot be sharded\n"
            "  use learner.parallel=ddp learner.tensor_parallel=1: every learner has all 4-bit weights"
        )
