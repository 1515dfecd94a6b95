"""The weights to publish or to save: gathered, in their working precision.

The learner may hold a weight as a shard (FSDP, tensor parallel): gathering it is a collective, so all ranks must
iterate together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from covey.errors import InputError
from covey.weights.files import WeightsDamaged

Named = Iterator[tuple[str, Tensor]]


def is_sharded(weight: Tensor) -> bool:
    return hasattr(weight, "full_tensor")


def working_dtype(weight: Tensor) -> torch.dtype:
    """The precision in which a weight is used and published. The master of a shard may be more precise."""
    dtype: torch.dtype = getattr(weight, "working_dtype", weight.dtype)
    return dtype


def whole_weight(weight: Any) -> Tensor:
    """A weight, gathered from its shards. These may be offloaded to CPU memory; they are gathered on the ranks' own
    device."""
    whole: Tensor = weight.detach()
    if is_sharded(weight):
        whole = whole.to(weight.device_mesh.device_type, working_dtype(weight)).full_tensor()  # type: ignore[attr-defined]
    return whole


@torch.no_grad()
def full_weights(model: Any, *, trained_only: bool = False) -> Named:
    """Every weight once, under the module's own names; unless `trained_only` with the buffers that model files have."""
    for name, weight in model.named_parameters():
        if weight.requires_grad or not trained_only:
            yield name, whole_weight(weight)
    if not trained_only:
        yield from _saved_buffers(model)


def _saved_buffers(model: Any) -> Named:
    """Buffers that are part of model files, such as the biases of GLM's routers."""
    saved = model.state_dict()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def trained_weights(model: Any) -> Named:
    """The weights to send to a copy of the same model: the adapters if there are any, else every weight."""
    return full_weights(model, trained_only=True)


@torch.no_grad()
def load_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Copy `trained_weights` of one process into the same model of another. All names must match."""
    own = dict(trained_weights(model))
    if set(own) != set(weights):
        names = ", ".join(sorted(set(own) ^ set(weights))[:3])
        raise WeightsDamaged(f"the engine's model is another than the learner's: they differ in {names}")
    for name, weight in weights.items():
        own[name].copy_(weight)


@torch.no_grad()
def named_weights(model: Any) -> Named:
    """Every weight once, as in the files of a plain model: adapters are merged into copies, a tied output matrix goes
    by the name of the embedding, and fused experts are split where the files have one tensor per expert."""
    from transformers.core_model_loading import revert_weight_conversion

    adapted = hasattr(model, "get_base_model")
    lm = model.get_base_model() if adapted else model
    weights = _merged_weights(model) if adapted else full_weights(model)
    for _, layer in itertools.groupby(weights, lambda named: _layer_of(named[0])):
        yield from revert_weight_conversion(lm, dict(layer)).items()


def _layer_of(name: str) -> str:
    """The name up to the first number, which is that of a layer; other names are returned whole."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: number + 1])


def _merged_weights(model: Any) -> Named:
    """Every weight of the base model under its own name, with adapters merged into copies."""
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
        yield f"{path}.{leaf}", whole_weight(weight)
    yield from _saved_buffers(base)


def _merged(layer: Any, weight: Tensor, adapters: list[str]) -> Tensor:
    """W + ΔW in float32, rounded once. The layer itself is not changed."""
    total = weight.float()
    for adapter in adapters:
        if adapter in layer.scaling:
            total = total + layer.get_delta_weight(adapter).float()
    return total.to(weight.dtype)


def _check_adapter(model: Any) -> None:
    for name in model.active_adapters:
        config = model.peft_config[name]
        if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA" or getattr(config, "use_dora", False):
            raise InputError("rollout=vllm supports plain LoRA adapters only\n  use rollout=embedded")
    base = model.get_base_model()
    if any(hasattr(module, "parameter_name") for module in base.modules()):  # peft's wrapper of a plain parameter
        raise InputError(
            "rollout=vllm: an adapter on fused experts cannot be merged\n"
            "  use rollout=embedded, or model.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]"
        )
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    if base.config.get_text_config(decoder=True).tie_word_embeddings and any(hasattr(e, "base_layer") for e in ends):
        raise InputError(
            "an adapter on the embedding or the output matrix cannot be merged: this model ties the two\n"
            "  remove it from model.lora.target_modules, or use rollout=embedded"
        )
