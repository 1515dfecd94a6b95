"""Keeping memory that was freed, on a CPU.

A training step frees and takes hundreds of large tensors. glibc gives each back to the system and gets it again page by
page, which costs a fifth of a step (benchmarks/malloc.py). Told to keep it, the process holds its peak until it ends.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of <malloc.h>


def keep_freed_memory() -> bool:
    """True if the system's allocator took the advice; another libc has no such knob, and nothing changes."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    advice = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 * 2**20))
    return all(bool(mallopt(knob, value)) for knob, value in advice)
