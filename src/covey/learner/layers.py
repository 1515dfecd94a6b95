"""The learner's decoder layers on a GPU: compiled by torch.

In layers that are built like Llama's, rotary embedding and attention are one operation (`attention.rotary_attention`).
What is cheap to compute again is not kept for the backward pass: the normalised inputs of matrices, and the product of
gate and up, together a third of what a layer would keep otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from covey.learner.attention import rotary_attention
from covey.models.families import FUSED_ATTENTION, causal_lm, decoder, layers_of
from covey.models.forwards import prepare_to_compile_layers, replaced_forwards

# Of torch's partitioner, which otherwise keeps every input of a matrix product.
PARTITIONER = {"ban_recompute_materialized_backward": False}


class CompiledLayers:
    """A model's decoder layers compiled once for sequences of any length, when they are first used."""

    def __init__(self, model: Any) -> None:
        self.layers = layers_of(decoder(causal_lm(model)))
        self.fused = FusedLayers(self.layers)
        self.forwards = [torch.compile(layer.forward, dynamic=True) for layer in self.layers]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the model compiled within this context. Other users of the model, such as the engine, are not
        affected."""
        prepare_to_compile_layers()
        compiled = replaced_forwards(zip(self.layers, self.forwards, strict=True))
        with compiled, self.fused.active(), torch._functorch.config.patch(PARTITIONER):
            yield


class FusedLayers:
    """Attention layers whose rotary embedding is part of attention."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.patches: list[tuple[Any, Callable[..., Any]]] = []
        for layer in layers:
            attend = getattr(layer, "self_attn", None)
            if type(attend).__name__ in FUSED_ATTENTION:
                self.patches.append((attend, MethodType(_attention, attend)))

    def active(self) -> AbstractContextManager[None]:
        return replaced_forwards(self.patches)


def _attention(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """[1, T, hidden] → [1, T, hidden]"""
    linears = (self.q_proj, self.k_proj, self.v_proj)
    # Not x[0], whose gradient is a padded copy.
    q, k, v = (x(hidden_states).squeeze(0).unflatten(-1, (-1, self.head_dim)) for x in linears)
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    cos, sin = (x.squeeze(0) for x in position_embeddings)
    out = rotary_attention(self, q, k, v, cos, sin, self.scaling)
    return self.o_proj(out.flatten(1)[None]), None
