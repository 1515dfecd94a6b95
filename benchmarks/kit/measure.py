"""Seconds, memory, the machine's name and rates, and the versions of everything that was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from covey.models import products
from kit.floors import Rates

# Bandwidth from the data sheet; matrix products as measured on this card with random bfloat16 matrices.
KNOWN = {"H200": Rates(4.8e12, 790e12, "an H200 in bfloat16")}
MIB, GIB = 2**20, 2**30


class _Clock:
    read = staticmethod(time.perf_counter)


def prepare(settings: Mapping[str, Any]) -> None:
    """The set-up of every side. With one thread on a CPU, seconds are CPU time, which depends little on other work of
    the machine."""
    torch.manual_seed(0)
    if settings["device"] == "cpu":
        threads = settings.get("threads") or os.cpu_count() or 1
        torch.set_num_threads(threads)
        _Clock.read = staticmethod(time.process_time if threads == 1 else time.perf_counter)


class Stopwatch:
    """Seconds of each stage, synchronized with the GPU. Implements `covey.training.step.Stages`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + now() - start


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return _Clock.read()


def reset_peak() -> None:
    """Reset the peak of a GPU. On a CPU the peak is that of the whole process and cannot be reset."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: str) -> dict[str, float]:
    """Peak GiB: of the process on a CPU; on a GPU of tensors, and of the memory reserved by the allocator."""
    if device == "cpu":
        return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
    found = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return {name: size / GIB for name, size in found.items()}


def about(device: str) -> dict[str, Any]:
    """The device and the versions of a measurement."""
    import covey

    names = ("torch", "transformers", "trl", "vllm", "triton")
    versions = {name: version for name in names if (version := _version(name))}
    return {
        "device": device_name(device),
        "versions": {"covey": covey.__version__, "python": platform.python_version(), **versions},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()}, {torch.get_num_threads()} threads"


def rates(device: str, dtype: torch.dtype, *, quick: bool = False) -> Rates:
    """The machine's limits: tabulated for known cards, otherwise measured."""
    if device == "cuda":
        for name, known in KNOWN.items():
            if name in torch.cuda.get_device_name():
                return known
    size, copied = (8192, 4 * GIB) if device == "cuda" else (2048, 512 * MIB)
    if quick:
        size, copied = 256, 8 * MIB
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    block = torch.empty(copied, dtype=torch.uint8, device=device).fill_(1)
    other = torch.empty_like(block)
    product = min(_fastest(lambda: a @ b), _fastest(lambda: products.product(a, b)))
    copy = _fastest(lambda: other.copy_(block))
    return Rates(2 * copied / copy, 2 * size**3 / product, f"measured: a product of {size}² matrices, a copy")


def _fastest(work: Any, times: int = 5) -> float:
    work()
    found = []
    for _ in range(times):
        start = now()
        work()
        found.append(now() - start)
    return min(found)


def machine(settings: dict[str, Any]) -> dict[str, Any]:
    """A separate side: the machine's name and limits, measured in a fresh process."""
    prepare(settings)
    dtype = getattr(torch, settings["dtype"])
    return {**about(settings["device"]), "rates": asdict(rates(settings["device"], dtype, quick=settings["quick"]))}


def merged(versions: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Versions of several sides as one table: one entry where they agree, otherwise each side's."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for table in versions.values() for name in table):
        of_side = {side: table[name] for side, table in versions.items() if name in table}
        if len(set(of_side.values())) == 1:
            found[name] = next(iter(of_side.values()))
        else:
            found[name] = ", ".join(f"{version} ({side})" for side, version in of_side.items())
    return found
