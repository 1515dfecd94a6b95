"""Decoder layers with fewer and larger kernels, for decoding on a GPU: one product for queries, keys and values, one
for gate and up; positions turn queries and keys inside attention.

The weights stay the learner's own parameters. Those that are multiplied together are moved side by side in memory, each
parameter a view of its part, so that an update of one is an update of the whole. Layers that are not built as Llama's
run as they are, and so do layers with adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from covey.rollout.embedded import attention
from covey.rollout.embedded.kernels import joined_attention

ATTENTION = ("LlamaAttention", "Qwen2Attention", "Qwen3Attention", "MistralAttention")
MLP = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP", "MistralMLP")


class JoinedLayers:
    def __init__(self, layers: Sequence[Any]) -> None:
        self.patches: list[tuple[Any, Any]] = []
        for layer in layers:
            attend, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
            if type(attend).__name__ in ATTENTION and _join_attention(attend):
                self.patches.append((attend, MethodType(_attention, attend)))
            if type(mlp).__name__ in MLP and _join_mlp(mlp):
                self.patches.append((mlp, MethodType(_mlp, mlp)))

    @contextmanager
    def active(self) -> Iterator[None]:
        """While this lasts, the layers compute one new token of each sequence, joined."""
        for module, forward in self.patches:
            module.forward = forward
        try:
            yield
        finally:
            for module, _ in self.patches:
                del module.forward


def _attention(self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any) -> Any:
    step = attention.current_step()
    qkv = linear(hidden_states[:, 0], self.joined_weight, self.joined_bias)
    cos, sin = (x[:, 0] for x in position_embeddings)
    out = joined_attention(
        qkv, cos, sin, self.joined_norms, step.keys, step.values, self.layer_idx, step.table_BN, step.position_B,
        self.scaling, self.joined_window, step.splits, self.joined_eps,
    )  # fmt: skip
    return self.o_proj(out.flatten(2)), None


def _mlp(self: Any, x: Tensor) -> Any:
    gate, up = linear(x, self.joined_weight, self.joined_bias).chunk(2, -1)
    return self.down_proj(self.act_fn(gate) * up)


def _join_attention(module: Any) -> bool:
    linears = (module.q_proj, module.k_proj, module.v_proj)
    if not _plain(linears):
        return False
    norms = (module.q_norm, module.k_norm) if hasattr(module, "q_norm") else None
    module.joined_weight = side_by_side([x.weight for x in linears])
    module.joined_bias = _biases(linears)
    module.joined_norms = None if norms is None else side_by_side([x.weight for x in norms]).view(2, -1)
    module.joined_eps = 0.0 if norms is None else norms[0].variance_epsilon
    own = type(module).__name__ != "MistralAttention"
    window = getattr(module, "sliding_window", None) if own else getattr(module.config, "sliding_window", None)
    module.joined_window = window or 0
    return True


def _join_mlp(module: Any) -> bool:
    linears = (module.gate_proj, module.up_proj)
    if not _plain(linears):
        return False
    module.joined_weight = side_by_side([x.weight for x in linears])
    module.joined_bias = _biases(linears)
    return True


def _plain(linears: Sequence[Any]) -> bool:
    return all(type(x) is nn.Linear for x in linears) and len({x.bias is None for x in linears}) == 1


def _biases(linears: Sequence[Any]) -> Tensor | None:
    return None if linears[0].bias is None else side_by_side([x.bias for x in linears])


@torch.no_grad()
def side_by_side(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor, of whose rows each parameter is a part from now on. Where they lie so already, nothing moves."""
    places = [p.data_ptr() for p in parameters]
    ends = [place + p.numel() * p.element_size() for place, p in zip(places, parameters, strict=True)]
    first, count = parameters[0], sum(len(p) for p in parameters)
    one = len({p.untyped_storage().data_ptr() for p in parameters}) == 1
    if one and places[1:] == ends[:-1]:
        return first.data.as_strided((count, *first.shape[1:]), first.stride())
    whole = torch.cat([p.data for p in parameters])
    for p, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        p.data = part
    return whole
