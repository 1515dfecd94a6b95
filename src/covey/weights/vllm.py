"""Weights for vLLM: two transports on the learner's side, and the extension that loads inside vLLM's own workers.

vLLM starts with empty weights and takes them under the names that model files have. The receiver is the engine's
connection to vLLM's process: `await call(command, **arguments)`.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from covey.weights.buckets import BUCKET, buckets, cuda_handle, from_cuda_handle, unpacked
from covey.weights.files import locked_weights_folder, write_weights
from covey.weights.names import named_weights
from covey.weights.transport import Lost

Call = Callable[..., Awaitable[Any]]
EXTENSION = f"{__name__}.WorkerExtension"


class VllmFileTransport:
    """A safetensors file, in shared memory if it fits. It is deleted once it is loaded."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._lock: IO[str] | None = None  # marks the folder as in use

    async def publish(self, source: Any, version: int, receivers: Mapping[int, Call]) -> Lost:
        """`source` is the learner's module. Adapters are merged into copies."""
        if self.folder is None:
            size = sum(p.numel() * p.element_size() for p in source.parameters())
            self.folder, self._lock = locked_weights_folder(size)
        manifest = await asyncio.to_thread(write_weights, named_weights(source), self.folder, version)
        for call in receivers.values():
            await call("load_file", path=manifest.path, digest=manifest.digest)
        Path(manifest.path).unlink()
        return {}

    def close(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


class CudaIpcTransport:
    """Buckets in GPU memory that vLLM maps, if it is the only process that shares the learner's GPU."""

    async def publish(self, source: Any, version: int, receivers: Mapping[int, Call]) -> Lost:
        """`source` is the learner's module. Adapters are merged into copies."""
        (call,) = receivers.values()
        largest = max(p.numel() * p.element_size() for p in source.parameters())
        device = next(iter(source.parameters())).device
        buffer = torch.empty(max(BUCKET, largest), dtype=torch.uint8, device=device)
        await call("load_begin")
        for layout in buckets(named_weights(source), buffer):
            torch.cuda.synchronize(device)
            # torch counts the readers of a handle, so each bucket needs a handle of its own.
            await call("load_bucket", handle=cuda_handle(buffer), layout=layout)
        await call("load_end")
        del buffer
        torch.cuda.ipc_collect()
        return {}

    def close(self) -> None:
        pass


class WorkerExtension:
    """Methods added to each of vLLM's workers (`worker_extension_cls`). vLLM's layerwise reload puts the weights where
    they belong, in the layout that its kernels need."""

    vllm_config: Any
    device: torch.device
    model_runner: Any

    def covey_load_begin(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.model_runner.get_model()
        self._covey_missing = {name for name, _ in model.named_parameters()}
        with torch.device(self.device):
            initialize_layerwise_reload(model)

    def covey_load_file(self, path: str) -> None:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            self._covey_load((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 (not a dict)

    def covey_load_bucket(self, handle: dict[str, Any], layout: list[dict[str, Any]]) -> None:
        self._covey_load(unpacked(from_cuda_handle(handle, self.device.index or 0), layout))
        torch.cuda.synchronize(self.device)

    def _covey_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        with torch.device(self.device), set_current_vllm_config(self.vllm_config):
            loaded = self.model_runner.get_model().load_weights(weights)
        if loaded is None:  # a model that does not report what it loaded
            self._covey_missing.clear()
        else:
            self._covey_missing -= loaded

    def covey_load_end(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        with torch.device(self.device), set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            if self.device.type == "cpu":
                _repack(model)
        if self._covey_missing:
            names = ", ".join(sorted(self._covey_missing)[:5])
            raise RuntimeError(f"vLLM's model has weights that the learner's model lacks: {names}")


def _repack(model: Any) -> None:
    """On a CPU some layers compute with packed copies, which vLLM's reload does not refresh: the output matrix, if it
    is tied to the embedding and so not loaded under a name of its own, and experts, packed at the first load only."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        elif type(module).__name__ == "RoutedExperts":  # in another place in each version
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
