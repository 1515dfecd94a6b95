"""Decoder layers compiled by torch, all by the same code: the small operations of a layer become few kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from covey.learner.forward import causal_lm


class CompiledLayers:
    """The layers of a model, compiled for lines of any length when they are first used."""

    def __init__(self, model: Any) -> None:
        self.layers = list(causal_lm(model).base_model.layers)
        self.forwards = [torch.compile(layer.forward, dynamic=True) for layer in self.layers]

    @contextmanager
    def active(self) -> Iterator[None]:
        """While this lasts, the model runs compiled. Others that use it, as the engine, see it as it was."""
        torch._dynamo.config.allow_unspec_int_on_nn_module = True  # the number of a layer is no reason to compile again
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for layer, forward in zip(self.layers, self.forwards, strict=True):
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward
