"""Memory of the machine and its GPUs: token budgets, cache sizes, allocator settings and metrics."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from covey.imports import torch

GIB = 2**30


def machine_memory() -> int:
    """Bytes of memory of this machine, free or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# -- Tokens of a training pass -----------------------------------------------------------------------------------------

CPU_TOKENS = 8192  # on a CPU, larger passes are not faster
CPU_TARGET = 1024  # there, small prompt groups share a pass up to this: as fast as larger passes, with less memory
CPU_SHARE = 0.6  # of the machine's memory that the activations of a pass may take
MOST_TOKENS = 10_240  # on a GPU, larger passes are hardly faster
PROBES = (256, 1280)  # tokens of the two measured passes
SHARE = 0.8  # of a GPU's free memory that a pass may take


def affordable_tokens(device: torch.device, try_tokens: Callable[[int], None], activation_bytes: int) -> int:
    """Tokens of one forward and backward pass. On a GPU, two small passes are measured. On a CPU, the machine's total
    memory decides, so that a resumed run gets the same number."""
    if device.type != "cuda":
        return cpu_tokens(machine_memory(), activation_bytes)
    peaks = []
    for count in (PROBES[0], *PROBES):  # the first pass warms up: it compiles, and loads what later passes reuse
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
    """Estimated bytes of activations kept for the backward pass: per layer about 10 vectors of the hidden size (norms,
    queries, keys, values, attention) and 4 of the MLP's size."""
    config = model.config.get_text_config(decoder=True)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    element = model.get_input_embeddings().weight.element_size()
    layer = config.hidden_size if model.is_gradient_checkpointing else 10 * config.hidden_size + 4 * inner
    return int(config.num_hidden_layers * layer * element)


def tokens_within(memory: float, tokens: tuple[int, int], peaks: tuple[int, int]) -> int:
    """Linear extrapolation from two measured passes."""
    each = max(1.0, (peaks[1] - peaks[0]) / (tokens[1] - tokens[0]))
    fixed = max(0.0, peaks[0] - each * tokens[0])
    return max(PROBES[0], min(MOST_TOKENS, int((memory - fixed) / each)))


# -- Tokens of a key-value cache ---------------------------------------------------------------------------------------


def cache_tokens(model: Any, share: float) -> int:
    """Tokens whose keys and values fit into a share of the GPU's free memory, or of this machine's memory."""
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


def grown_size(current: int, needed: int, limit: int | None, multiple: int = 1) -> int:
    """The new size of a buffer: at least 1.5 times the current one, so that repeated growth stays cheap, but not more
    than `limit` unless needed; rounded up to a multiple."""
    if needed <= current:
        return current
    size = max(needed, current + current // 2)
    bounded = size if limit is None else max(needed, min(size, limit))
    return -(-bounded // multiple) * multiple


# -- Allocators --------------------------------------------------------------------------------------------------------

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8  # from <malloc.h>


def disable_cudnn_attention() -> None:
    """cuDNN's attention caches a plan for every shape, about a megabyte of host memory each, for the lifetime of its
    thread. With completions of many lengths the cache grows without bound. The other attention kernels cache
    nothing."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory instead of returning it to the system. A training step frees and allocates hundreds
    of large tensors, and getting them back page by page costs a fifth of a step (benchmarks/malloc.py). One arena
    serves all threads: with several, each would keep a peak of its own. False if the libc has no such settings."""
    if (mallopt := _from_glibc("mallopt")) is None:
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 * 2**20), (M_ARENA_MAX, 1))
    return all(bool(mallopt(name, value)) for name, value in settings)


def trim_freed_memory() -> bool:
    """Return freed memory to the system: otherwise the process keeps its highest peak. The next step has to get it back
    page by page, so call this only together with slow operations. False if the libc has no such function."""
    if (trim := _from_glibc("malloc_trim")) is None:
        return False
    trim(0)
    return True


def _from_glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


# -- Metrics -----------------------------------------------------------------------------------------------------------


def memory_metrics() -> dict[str, float]:
    """Memory of this process, where the system reports it, and on GPUs the peak of tensors since the last call."""
    metrics = {}
    statm = Path("/proc/self/statm")
    if statm.exists():
        metrics["perf/memory_gib"] = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        metrics["perf/gpu_memory_gib"] = sum(map(torch.cuda.max_memory_allocated, devices)) / GIB
        metrics["perf/gpu_reserved_gib"] = sum(map(torch.cuda.memory_reserved, devices)) / GIB
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
    return metrics
