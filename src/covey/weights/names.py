"""The learner's weights on their way to an engine with a copy of its own: under the names that model files have, with
adapters merged into copies, in a file or in buckets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.errors import InputError
from covey.storage import sha256 as file_digest
from covey.storage import sync, writing

Named = Iterator[tuple[str, Tensor]]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - folders in it are made by mkdtemp
BUCKET = 512 * 2**20  # bytes sent at once over CUDA IPC, or a weight that is larger


@torch.no_grad()
def named_weights(model: Any) -> Named:
    """Every weight once, one after the other; a tied output matrix goes by the name of the embedding. Weights that are
    shared out over the learner's ranks are gathered one at a time: all ranks must go through them together."""
    if not hasattr(model, "get_base_model"):
        yield from ((name, _whole(weight)) for name, weight in model.named_parameters())
        return
    _check_adapter(model)
    base = model.get_base_model()
    for name, weight in base.named_parameters():
        path, _, leaf = name.rpartition(".")
        if ".lora_" in f".{name}" or ".original_module" in path:
            continue
        for wrapper in model.active_adapters:
            path = path.removesuffix(f".modules_to_save.{wrapper}")
        if path.endswith(".base_layer"):
            path = path.removesuffix(".base_layer")
            if leaf == "weight":
                weight = _merged(base.get_submodule(path), weight, model.active_adapters)
        yield f"{path}.{leaf}", _whole(weight)


def _whole(weight: Any) -> Tensor:
    """All rows of a weight, in the precision that it is used in: a rank's own rows may be more exact, and wait in CPU
    memory."""
    found: Tensor = weight.detach()
    if not hasattr(weight, "full_tensor"):
        return found
    used = getattr(weight, "working_dtype", weight.dtype)
    full: Tensor = found.to(weight.device_mesh.device_type, used).full_tensor()  # type: ignore[attr-defined]
    return full


def _merged(layer: Any, weight: Tensor, adapters: list[str]) -> Tensor:
    """W + ΔW in float32, rounded once. The layer itself stays as it is."""
    total = weight.float()
    for adapter in adapters:
        if adapter in layer.scaling:
            total = total + layer.get_delta_weight(adapter).float()
    return total.to(weight.dtype)


def _check_adapter(model: Any) -> None:
    for name in model.active_adapters:
        config = model.peft_config[name]
        if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA" or getattr(config, "use_dora", False):
            raise InputError("rollout=vllm knows plain LoRA adapters only\n  use rollout=embedded")
    base = model.get_base_model()
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    if base.config.get_text_config(decoder=True).tie_word_embeddings and any(hasattr(e, "base_layer") for e in ends):
        raise InputError(
            "an adapter on the embedding or the output matrix, which are one in this model, cannot be merged into it\n"
            "  take it out of model.lora.target_modules, or use rollout=embedded"
        )


def weights_folder(size: int) -> Path:
    """A folder of one's own for files of so many bytes: in shared memory where there is room."""
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 1.5 * size
    return Path(tempfile.mkdtemp(prefix="covey-weights-", dir=SHARED_MEMORY if roomy else None))


def write_weights(named: Named, folder: Path, version: int) -> tuple[Path, str]:
    """One safetensors file and its sha256: written beside, fsynced, renamed."""
    from safetensors.torch import save_file

    path = folder / f"version-{version}.safetensors"
    work = path.with_suffix(".writing")
    weights = {name: weight.cpu().contiguous() for name, weight in named}
    try:
        with writing(path, needs=sum(weight.numel() * weight.element_size() for weight in weights.values())):
            save_file(weights, work)
            digest = file_digest(work)
            sync(work)
            work.rename(path)
    finally:
        work.unlink(missing_ok=True)
    return path, digest


def buckets(named: Named, buffer: Tensor) -> Iterator[list[dict[str, Any]]]:
    """Weights laid into a buffer of bytes as often as it takes: each time, what lies where. The buffer is written again
    when the next list is asked for."""
    layout: list[dict[str, Any]] = []
    at = 0
    for name, weight in named:
        data = weight.contiguous().view(-1).view(torch.uint8)
        if at + len(data) > len(buffer):
            yield layout
            layout, at = [], 0
        buffer[at : at + len(data)].copy_(data)
        layout.append(
            {"name": name, "dtype": str(weight.dtype).removeprefix("torch."), "shape": [*weight.shape], "at": at}
        )
        at += -(-len(data) // 16) * 16  # a view as another type must begin at a multiple of its size
    if layout:
        yield layout


def unpacked(buffer: Tensor, layout: list[dict[str, Any]]) -> Named:
    """The weights of a bucket, copied: the buffer is written again before a layer may be complete."""
    for entry in layout:
        dtype = getattr(torch, entry["dtype"])
        count = dtype.itemsize
        for side in entry["shape"]:
            count *= side
        part = buffer[entry["at"] : entry["at"] + count].view(dtype)
        yield entry["name"], part.view(entry["shape"]).clone()


def cuda_handle(buffer: Tensor) -> dict[str, Any]:
    """What another process on the same GPU needs to see a buffer, as JSON can say it."""
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
    """The buffer of bytes behind a handle."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    found: Tensor = rebuild_cuda_tensor(
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
    return found


def is_sharded(weight: Tensor) -> bool:
    return hasattr(weight, "full_tensor")


def working_dtype(weight: Tensor) -> torch.dtype:
    """The precision in which a weight is used and published; of a shard, not that of the master."""
    found: torch.dtype = getattr(weight, "working_dtype", weight.dtype)
    return found


@torch.no_grad()
def full_weights(model: Any, *, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every weight once, whole, in its working precision. All ranks must go through it together."""
    for name, weight in model.named_parameters():
        if weight.requires_grad or not trained_only:
            yield name, whole_weight(weight)


def whole_weight(weight: Any) -> Tensor:
    """All rows of a weight, gathered on the device that ranks talk through: shards may wait in CPU memory."""
    if not is_sharded(weight):
        whole: Tensor = weight.detach()
        return whole
    full: Tensor = weight.detach().to(weight.device_mesh.device_type, working_dtype(weight)).full_tensor()
    return full
