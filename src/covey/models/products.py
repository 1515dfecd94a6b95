"""Matrix products of float32 on a CPU, by oneDNN where it is faster than torch's own.

torch multiplies float32 matrices with MKL, which uses AVX-512 on Intel's processors only; oneDNN uses it on all.
On an AMD processor of the Zen 5 generation its products are 2.2 times as fast. The result differs by rounding.

oneDNN compiles code for every shape and keeps it with a buffer as large as the rows, in a cache of a thousand shapes.
Packed sequences have any length, so products are computed in blocks of BLOCK rows, the last one padded to a multiple of
STEP if it has more: the cache then holds a few shapes of each layer.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

BLOCK, STEP = 512, 64
WIDE = 2**23  # entries of a matrix whose products are too large to be copied together from blocks
LEAST = 2**22  # multiplications: smaller products do not repay the call


@cache
def prefers_onednn() -> bool:
    """Whether this is a processor with AVX-512 that is not Intel's."""
    cpu = Path("/proc/cpuinfo")
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and cpu.is_file()
        and "GenuineIntel" not in cpu.read_text()
    )


def block_rows(rows: int) -> int:
    """At most `rows`, and if possible a number that needs no padding."""
    return rows - rows % STEP if rows > STEP and prefers_onednn() else rows


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a · b, [M, N], without gradient."""
    return _multiply(a_MK, b_KN.t()) if _takes(a_MK, b_KN) else a_MK @ b_KN


def fast_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`."""
    if not _takes(x, weight_NK):
        return linear(x, weight_NK, bias_N)
    out: Tensor = _Linear.apply(x, weight_NK, bias_N)
    return out


@contextmanager
def fast_linears() -> Iterator[None]:
    """Linear layers compute with `fast_linear` in this context. It must stay open until the backward pass is over,
    which repeats the forward pass if gradients are checkpointed."""
    if not prefers_onednn() or nn.Linear.forward is _forward:
        yield
        return
    before = nn.Linear.forward
    nn.Linear.forward = _forward  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Linear.forward = before  # type: ignore[method-assign]


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    return fast_linear(input, layer.weight, layer.bias)


def _takes(x: Tensor, matrix: Tensor) -> bool:
    """Whether oneDNN computes this product. Weights that are sharded over ranks have a type of their own."""
    plain = all(type(t) in (Tensor, nn.Parameter) and t.is_cpu and t.dtype == torch.float32 for t in (x, matrix))
    multiplications = x.numel() // max(1, x.shape[-1]) * matrix.numel()
    return plain and multiplications >= LEAST and prefers_onednn()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        return _multiply(x.reshape(-1, x.shape[-1]), weight_NK, bias_N).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_NK = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        grad_MN = gradients[0].reshape(-1, len(weight_NK))
        return (
            _multiply(grad_MN, weight_NK.t()).view(x.shape) if to_x else None,
            sum_of_products(grad_MN, x.reshape(-1, x.shape[-1])) if to_weight else None,
            grad_MN.sum(0) if to_bias else None,
        )


def _multiply(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, block by block."""
    size = BLOCK if weight_NK.numel() < WIDE else len(x_MK)
    parts = [_onednn(block, weight_NK, bias_N) for block in _blocks(x_MK, size)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[: len(x_MK)]


def sum_of_products(a_MN: Tensor, b_MK: Tensor) -> Tensor:
    """aᵀ · b, [N, K]: a sum over blocks of rows."""
    if not _takes(a_MN.t(), b_MK):
        return a_MN.t() @ b_MK
    size = BLOCK if a_MN.shape[1] * b_MK.shape[1] < WIDE else len(a_MN)
    total: Tensor | None = None
    for a, b in zip(_blocks(a_MN, size), _blocks(b_MK, size), strict=True):
        part = _onednn(a.t(), b.t(), None)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _blocks(x_MK: Tensor, size: int) -> Iterator[Tensor]:
    for block in x_MK.split(size):
        missing = -len(block) % STEP if len(block) > STEP else 0
        yield pad(block, (0, 0, 0, missing)) if missing else block


def _onednn(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, bias_N, "none", [], "")
    return out
