"""Weights packed into a buffer of bytes, bucket after bucket, and CUDA IPC handles that share such a buffer.

A layout lists what a bucket holds: {"name", "dtype", "shape", "at"} for each weight, `at` being its first byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from covey.weights.names import Named

BUCKET = 512 * 2**20  # bytes sent at once; a larger weight is sent alone
ALIGNMENT = 16  # bytes: a view of another type must start at a multiple of its size

Layout = list[dict[str, Any]]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def bucket_size(model: Any) -> int:
    """Bytes of the buffer: room for the largest trained weight, and not more than all of them need."""
    sizes = [_aligned(w.numel() * w.element_size()) for w in model.parameters() if w.requires_grad]
    return max(max(sizes), min(BUCKET, sum(sizes)))


def buckets(named: Named, buffer: Tensor) -> Iterator[Layout]:
    """Fill the buffer as often as needed and yield its layout each time. The next iteration overwrites the buffer."""
    layout: Layout = []
    at = 0
    for name, weight in named:
        data = weight.contiguous().view(-1).view(torch.uint8)
        if at + len(data) > len(buffer):
            yield layout
            layout, at = [], 0
        buffer[at : at + len(data)].copy_(data)
        dtype = str(weight.dtype).removeprefix("torch.")
        layout.append({"name": name, "dtype": dtype, "shape": [*weight.shape], "at": at})
        at += _aligned(len(data))
    if layout:
        yield layout


def _span(entry: dict[str, Any]) -> tuple[int, int]:
    return entry["at"], entry["at"] + math.prod(entry["shape"]) * getattr(torch, entry["dtype"]).itemsize


def used_bytes(layout: Layout) -> int:
    return _span(layout[-1])[1]


def unpacked(buffer: Tensor, layout: Layout) -> Named:
    """The weights of a bucket, copied: the buffer may be overwritten before a layer has all of its weights."""
    for entry in layout:
        start, end = _span(entry)
        yield entry["name"], buffer[start:end].view(getattr(torch, entry["dtype"])).view(entry["shape"]).clone()


# -- CUDA IPC --------------------------------------------------------------------------------------------------------


def cuda_handle(buffer: Tensor) -> dict[str, Any]:
    """A handle, as JSON, by which another process on the same GPU can map the buffer. Good for one reader."""
    from torch.multiprocessing.reductions import reduce_tensor

    arguments = reduce_tensor(buffer)[1]
    _, size, stride, offset, _, _, _, handle, bytes_, start, _, counter, count_at, event, synced = arguments
    return {
        "size": [*size],
        "stride": [*stride],
        "offset": offset,
        "handle": handle.hex(),
        "storage_bytes": bytes_,
        "storage_offset": start,
        "counter": counter.hex(),
        "counter_offset": count_at,
        "event": event.hex(),
        "event_sync": synced,
    }


def from_cuda_handle(handle: dict[str, Any], device: int) -> Tensor:
    """The buffer behind a handle."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    buffer: Tensor = rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size(handle["size"]),
        tuple(handle["stride"]),
        handle["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        device,
        bytes.fromhex(handle["handle"]),
        handle["storage_bytes"],
        handle["storage_offset"],
        False,
        bytes.fromhex(handle["counter"]),
        handle["counter_offset"],
        bytes.fromhex(handle["event"]),
        handle["event_sync"],
    )
    return buffer
