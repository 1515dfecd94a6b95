"""The learner's decoder layers on a GPU: compiled by torch, with fewer and larger kernels.

    projections   one product for queries, keys and values, one for gate and up
    rotary        one kernel for queries and keys (`attention.rotate`)
    kept          what is cheap to compute again is not kept for the backward pass: normalised inputs of matrices, and
                  the product of the activated gate and up, a third of what a layer would keep otherwise

The parameters stay as they are. Layers with adapters keep their own projections; layers that are not built like
Llama's are only compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from covey.learner.attention import rotate
from covey.learner.forward import causal_lm
from covey.models.families import FUSED_ATTENTION, FUSED_MLP, decoder

# Of torch's partitioner, which otherwise keeps every input of a matrix product.
PARTITIONER = {"ban_recompute_materialized_backward": False}


class CompiledLayers:
    """A model's decoder layers compiled once for sequences of any length, when they are first used."""

    def __init__(self, model: Any) -> None:
        self.layers = list(decoder(causal_lm(model)).layers)
        self.fused = FusedLayers(self.layers)
        self.forwards = [torch.compile(layer.forward, dynamic=True) for layer in self.layers]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the model compiled within this context. Other users of the model, such as the engine, are not
        affected."""
        torch._dynamo.config.allow_unspec_int_on_nn_module = True  # a layer's index must not cause a recompilation
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for layer, forward in zip(self.layers, self.forwards, strict=True):
            layer.forward = forward
        try:
            with self.fused.active(), torch._functorch.config.patch(PARTITIONER):
                yield
        finally:
            for layer in self.layers:
                del layer.forward


class FusedLayers:
    """Forward passes of attention and MLP that compute the same with fewer products."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.patches: list[tuple[Any, Callable[..., Any]]] = []
        for layer in layers:
            attend: Any = getattr(layer, "self_attn", None)
            mlp: Any = getattr(layer, "mlp", None)
            if type(attend).__name__ in FUSED_ATTENTION:
                self.patches.append((attend, MethodType(_attention, attend)))
            if type(mlp).__name__ in FUSED_MLP and _are_plain((mlp.gate_proj, mlp.up_proj)):
                self.patches.append((mlp, MethodType(_mlp, mlp)))

    @contextmanager
    def active(self) -> Iterator[None]:
        for module, forward in self.patches:
            module.forward = forward
        try:
            yield
        finally:
            for module, _ in self.patches:
                del module.forward


def _attention(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Any = None, **_: Any
) -> tuple[Tensor, None]:
    """[1, T, hidden] → [1, T, hidden]"""
    linears = (self.q_proj, self.k_proj, self.v_proj)
    tokens = hidden_states.shape[1]
    if _are_plain(linears):
        parts = _product(hidden_states, linears).split([x.out_features for x in linears], -1)
    else:
        parts = tuple(x(hidden_states) for x in linears)
    q, k, v = (x.reshape(1, tokens, -1, self.head_dim) for x in parts)
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    q, k = rotate(q, k, *position_embeddings)
    out, _ = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](
        self,
        *(x.transpose(1, 2) for x in (q, k, v)),
        attention_mask,
        scaling=self.scaling,
        sliding_window=getattr(self, "sliding_window", getattr(self.config, "sliding_window", None)),
    )
    return self.o_proj(out.reshape(1, tokens, -1)), None


def _mlp(self: Any, x: Tensor) -> Tensor:
    gate, up = _product(x, (self.gate_proj, self.up_proj)).chunk(2, -1)
    out: Tensor = self.down_proj(self.act_fn(gate) * up)
    return out


def _product(x: Tensor, linears: Sequence[nn.Linear]) -> Tensor:
    """All outputs side by side. Copying the weights costs little next to a product for thousands of tokens."""
    weights: list[Tensor] = [each.weight for each in linears]
    biases: list[Tensor] = [each.bias for each in linears]
    return linear(x, torch.cat(weights), None if biases[0] is None else torch.cat(biases))


def _are_plain(linears: Sequence[Any]) -> bool:
    return all(type(x) is nn.Linear for x in linears) and len({x.bias is None for x in linears}) == 1
