"""What Covey adds to each of vLLM's own workers (`worker_extension_cls`): new weights, into the model as it runs.

Weights come under the names that model files have. vLLM's own reloading puts them where they belong, and into the form
that its kernels want, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Extension:
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
        from covey.weights.names import from_cuda_handle, unpacked

        self._covey_load(unpacked(from_cuda_handle(handle, self.device.index or 0), layout))
        torch.cuda.synchronize(self.device)

    def _covey_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        with torch.device(self.device), set_current_vllm_config(self.vllm_config):
            loaded = self.model_runner.get_model().load_weights(weights)
        if loaded is None:  # a model that keeps no account
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
                _repack_output(model)
        if self._covey_missing:
            names = ", ".join(sorted(self._covey_missing)[:5])
            raise RuntimeError(f"vLLM's model has weights that the learner's has not: {names}")


def _repack_output(model: Any) -> None:
    """On a CPU the output matrix is a packed copy; one that is tied to the embedding is not loaded by its own name, so
    vLLM's reloading leaves the copy as it was."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
