"""What this process holds, for the record of a step: growth shows in a curve long before it ends a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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
