"""Matrix products on a CPU with weights in the order in which they are multiplied.

With weights that oneDNN has laid out for itself a step of decoding takes a fifth less time at 64 rows, a third less at
16 (benchmarks/decode_cpu.py). Laying them out costs what about ten steps win, and memory for a second copy: it is done
when more steps than that are ahead, and where the copy is small beside the machine. New weights make it void.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from covey.rollout.embedded.memory import machine_memory

WORTH_PACKING = 16  # steps ahead
SHARE = 0.1  # of this machine's memory that the copy may take
ROWS = 64  # that the order is best for; it is good for others too


class PackedLinears:
    def __init__(self, model: Any) -> None:
        self.layers = [
            module
            for module in model.modules()
            if type(module) is torch.nn.Linear
            and module.weight.device.type == "cpu"
            and module.weight.dtype == torch.float32
        ]
        size = sum(layer.weight.nbytes for layer in self.layers)
        if size > SHARE * machine_memory() or not torch.backends.mkldnn.is_available():
            self.layers = []
        self.forwards: list[Callable[[Tensor], Tensor]] = []  # of the layers, once they are packed

    def pack(self) -> None:
        """With the weights of this moment, unless it is done."""
        if not self.forwards:
            self.forwards = [_packed(layer.weight.detach(), layer.bias) for layer in self.layers]

    def drop(self) -> None:
        self.forwards = []

    @contextmanager
    def used(self) -> Iterator[None]:
        """While this lasts, the model's linear layers are the packed ones, if there are any."""
        layers = self.layers if self.forwards else []
        for layer, forward in zip(layers, self.forwards, strict=True):
            layer.__dict__["forward"] = forward  # past Module's own bookkeeping, which would cost more than it saves
        try:
            yield
        finally:
            for layer in layers:
                del layer.__dict__["forward"]


def _packed(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)

    def forward(x: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, laid_out, bias, "none", [], "")
        return found

    return forward
