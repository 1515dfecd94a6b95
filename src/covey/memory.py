"""Memory of the machine and its GPUs: free memory, cache sizes, allocator settings and metrics."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from covey.imports import torch

GIB = 2**30


def machine_memory() -> int:
    """Bytes of memory of this machine, free or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def gpu_free(device: torch.device) -> int:
    """Bytes of a GPU that torch can still use, those that it has reserved and freed included."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


# -- Tokens of a key-value cache ---------------------------------------------------------------------------------------


def cache_bytes_per_token(model: Any) -> int:
    """Bytes of a token's keys and values in all layers."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * dim * model.get_input_embeddings().weight.element_size())


def cache_tokens(model: Any, share: float) -> int:
    """Tokens whose keys and values fit into a share of the GPU's free memory, or of this machine's memory."""
    weight, token = model.get_input_embeddings().weight, cache_bytes_per_token(model)
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
