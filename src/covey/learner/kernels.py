"""Triton kernels for log-probs and entropy: one pass over the logits forward, one backward.

`logprobs.py` has the same in plain torch.

Shapes: M sampled tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096


@triton.jit
def _statistics(logits, target, lse, chosen, entropy, stride, V, inverse_temperature, TILE: tl.constexpr):
    """Row m, with x = logits / temperature: log Σ exp x, x_y − log Σ exp x, and the entropy. Online, in float32."""
    m = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    top = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    weighted = tl.zeros([TILE], tl.float32)
    for start in range(0, V, TILE):
        at = start + lane
        x = tl.load(logits + m * stride + at, mask=at < V, other=float("-inf")).to(tl.float32) * inverse_temperature
        peak = tl.maximum(top, x)
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        shrink = tl.exp(top - safe)
        e = tl.exp(x - safe)
        mass = mass * shrink + e
        weighted = weighted * shrink + tl.where(at < V, x * e, 0.0)
        top = peak
    peak = tl.max(top, 0)
    shrink = tl.exp(top - peak)
    total = tl.sum(mass * shrink, 0)
    log_sum = peak + tl.log(total)
    y = tl.load(logits + m * stride + tl.load(target + m)).to(tl.float32) * inverse_temperature
    tl.store(lse + m, log_sum)
    tl.store(chosen + m, y - log_sum)
    tl.store(entropy + m, log_sum - tl.sum(weighted * shrink, 0) / total)


@triton.jit
def _gradient(
    logits, target, lse, entropy, to_chosen, to_entropy, stride, V, inverse_temperature,
    WITH_ENTROPY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradient with respect to one tile of row m's logits, in place."""
    m = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    place = logits + m * stride + at
    x = tl.load(place, mask=at < V, other=float("-inf")).to(tl.float32) * inverse_temperature
    log_p = x - tl.load(lse + m)
    p = tl.exp(log_p)
    g = tl.load(to_chosen + m)
    grad = g * (tl.where(at == tl.load(target + m), 1.0, 0.0) - p)
    if WITH_ENTROPY:
        grad -= tl.load(to_entropy + m) * tl.where(p > 0, p * (log_p + tl.load(entropy + m)), 0.0)
    tl.store(place, (grad * inverse_temperature).to(logits.dtype.element_ty), mask=at < V)


def row_statistics(logits_MV: Tensor, target_M: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """log Σ exp, log-prob of the target, entropy of softmax(logits / temperature); float32 [M] each."""
    rows, vocabulary = logits_MV.shape
    lse, chosen, entropy = torch.empty(3, rows, dtype=torch.float32, device=logits_MV.device)
    _statistics[(rows,)](
        logits_MV, target_M, lse, chosen, entropy, logits_MV.stride(0), vocabulary, 1 / temperature,
        TILE=TILE, num_warps=8,
    )  # fmt: skip
    return lse, chosen, entropy


def gradient_in_place(
    logits_MV: Tensor,
    target_M: Tensor,
    lse_M: Tensor,
    entropy_M: Tensor,
    to_chosen_M: Tensor,
    to_entropy_M: Tensor | None,
    temperature: float,
) -> Tensor:
    """Replaces the logits by their gradient."""
    rows, vocabulary = logits_MV.shape
    _gradient[(rows, triton.cdiv(vocabulary, TILE))](
        logits_MV, target_M, lse_M, entropy_M, to_chosen_M, to_entropy_M if to_entropy_M is not None else to_chosen_M,
        logits_MV.stride(0), vocabulary, 1 / temperature, WITH_ENTROPY=to_entropy_M is not None, TILE=TILE, num_warps=8,
    )  # fmt: skip
    return logits_MV
