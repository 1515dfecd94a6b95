"""Memory: how many tokens a forward pass may hold, keeping what was freed on a CPU, keeping little beside a GPU.

A training step frees and takes hundreds of large tensors. glibc gives each back to the system and gets it again page by
page, which costs a fifth of a step (benchmarks/malloc.py). Told to keep it, the process holds its peak until the next
checkpoint; and one arena serves all threads, where each would keep a peak of its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from covey.imports import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8  # of <malloc.h>

CPU_TOKENS = 8192  # on a CPU: more in one pass is not faster
CPU_SHARE = 0.6  # of a machine's memory that the activations of a pass may take
MOST_TOKENS = 10_240  # on a GPU: more in one pass is hardly faster
PROBES = (256, 1280)  # tokens
SHARE = 0.8  # of the free memory that a pass may take


def affordable_tokens(device: torch.device, try_tokens: Callable[[int], None], activation_bytes: int) -> int:
    """Tokens of one forward and backward pass: what fits into a GPU's free memory, found out by two small passes. On a
    CPU the machine's whole memory decides, so that a resumed run finds the same number."""
    if device.type != "cuda":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cpu_tokens(memory, activation_bytes)
    peaks = []
    for count in (PROBES[0], *PROBES):  # the first also compiles and loads what later passes find there
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        try_tokens(count)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return tokens_within(free * SHARE, PROBES, (peaks[1], peaks[2]))


def cpu_tokens(memory: int, activation_bytes: int) -> int:
    """CPU_TOKENS, halved until their activations fit."""
    tokens = CPU_TOKENS
    while tokens > PROBES[0] and tokens * activation_bytes > memory * CPU_SHARE:
        tokens //= 2
    return tokens


def bytes_per_token(model: Any) -> int:
    """Of activations that a forward pass keeps for the backward pass, estimated from the model's shape: per layer about
    10 vectors of the hidden size (norms, queries, keys, values, attention) and 4 of the MLP's."""
    config = model.config.get_text_config(decoder=True)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    element = model.get_input_embeddings().weight.element_size()
    layer = config.hidden_size if model.is_gradient_checkpointing else 10 * config.hidden_size + 4 * inner
    return int(config.num_hidden_layers * layer * element)


def tokens_within(memory: float, tokens: tuple[int, int], peaks: tuple[int, int]) -> int:
    """A line through two measurements, read backwards."""
    each = max(1.0, (peaks[1] - peaks[0]) / (tokens[1] - tokens[0]))
    fixed = max(0.0, peaks[0] - each * tokens[0])
    return max(PROBES[0], min(MOST_TOKENS, int((memory - fixed) / each)))


def without_plans_by_shape() -> None:
    """cuDNN's attention keeps a plan for every shape it has seen, about a megabyte of the host's memory each, as long
    as its thread lives. Answers come in all lengths, so that never ends; the other kernels keep nothing."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def keep_freed_memory() -> bool:
    """True if the system's allocator took the advice; another libc has no such knob, and nothing changes."""
    if (mallopt := _of_glibc("mallopt")) is None:
        return False
    advice = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 * 2**20), (M_ARENA_MAX, 1))
    return all(bool(mallopt(knob, value)) for knob, value in advice)


def give_back_kept_memory() -> bool:
    """What rare peaks have left: a process that is never asked holds the highest of all. The next step takes again what
    it needs, page by page, so this is for moments that take long themselves. False where the libc has no such knob."""
    if (trim := _of_glibc("malloc_trim")) is None:
        return False
    trim(0)
    return True


def _of_glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


# -- How large the cache may become ------------------------------------------------------------------------------------


def cache_tokens(model: Any, share: float) -> int:
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


# -- What this process holds, for the record of a step: growth shows in a curve long before it ends a run --------------

GIB = 2**30


def held() -> dict[str, float]:
    """`perf/memory_gib` where the system tells it, and on GPUs the most that tensors took since the last call."""
    found = {}
    statm = Path("/proc/self/statm")
    if statm.exists():
        found["perf/memory_gib"] = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        found["perf/gpu_memory_gib"] = sum(map(torch.cuda.max_memory_allocated, devices)) / GIB
        found["perf/gpu_reserved_gib"] = sum(map(torch.cuda.memory_reserved, devices)) / GIB
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
    return found
