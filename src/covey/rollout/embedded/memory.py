"""How large the cache may become."""

from __future__ import annotations

import os
from typing import Any

import torch


def affordable_tokens(model: Any, share: float) -> int:
    """Tokens whose keys and values fit into that share of the GPU's free memory, or of this machine's."""
    weight = model.get_input_embeddings().weight
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * dim * weight.element_size()
    if weight.device.type == "cuda":
        torch.cuda.empty_cache()
        memory, _ = torch.cuda.mem_get_info(weight.device)
    else:
        memory = machine_memory()
    return int(memory * share) // token


def machine_memory() -> int:
    """Bytes of this machine, whoever uses them."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def grown(now: int, need: int, most: int | None, multiple: int = 1) -> int:
    """What is needed, but at least half as much again as there was (`most` at most), so that growing by a little
    many times costs little; rounded up."""
    if need <= now:
        return now
    wanted = max(need, now + now // 2)
    bounded = wanted if most is None else max(need, min(wanted, most))
    return -(-bounded // multiple) * multiple
