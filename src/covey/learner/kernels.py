"""Triton kernels of the learner: log-probs and entropy in one pass over the logits forward and one backward, rotary
embedding, and sums of gradients.

`logprobs.py` and `attention.py` have the same in plain torch.

Shapes: M sampled tokens, V vocabulary, T tokens, H query heads, K key heads, D head size.
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


# -- rotary embedding -------------------------------------------------------------------------------------------------


@triton.jit
def _turn(
    x, out, t, c1, c2, s1, s2, HEADS: tl.constexpr, PAD: tl.constexpr, HALF: tl.constexpr, HALFPAD: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    h = tl.arange(0, PAD)[:, None]
    d = tl.arange(0, HALFPAD)[None]
    inside = (h < HEADS) & (d < HALF)
    place = t * HEADS * 2 * HALF + h * 2 * HALF + d
    a = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + place + HALF, mask=inside, other=0.0).to(tl.float32)
    if TRANSPOSED:
        first, second = a * c1 + b * s2, b * c2 - a * s1
    else:
        first, second = a * c1 - b * s1, b * c2 + a * s2
    tl.store(out + place, first.to(out.dtype.element_ty), mask=inside)
    tl.store(out + place + HALF, second.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    q, k, cos, sin, out_q, out_k, H: tl.constexpr, HPAD: tl.constexpr, K: tl.constexpr, KPAD: tl.constexpr,
    HALF: tl.constexpr, HALFPAD: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """All heads of token t."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALFPAD)[None]
    at = t * 2 * HALF + d
    c1 = tl.load(cos + at, mask=d < HALF, other=0.0).to(tl.float32)
    c2 = tl.load(cos + at + HALF, mask=d < HALF, other=0.0).to(tl.float32)
    s1 = tl.load(sin + at, mask=d < HALF, other=0.0).to(tl.float32)
    s2 = tl.load(sin + at + HALF, mask=d < HALF, other=0.0).to(tl.float32)
    _turn(q, out_q, t, c1, c2, s1, s2, H, HPAD, HALF, HALFPAD, TRANSPOSED)
    _turn(k, out_k, t, c1, c2, s1, s2, K, KPAD, HALF, HALFPAD, TRANSPOSED)


def rotate_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """[1, T, H, D] and [1, T, K, D] rotated by cos and sin [1, T, D]."""
    tokens, heads, dim = q.shape[1:]
    kv = k.shape[2]
    q, k, cos, sin = (x.contiguous() for x in (q, k, cos, sin))
    out_q, out_k = torch.empty_like(q), torch.empty_like(k)
    _rotate[(tokens,)](
        q, k, cos, sin, out_q, out_k, H=heads, HPAD=triton.next_power_of_2(heads), K=kv,
        KPAD=triton.next_power_of_2(kv), HALF=dim // 2, HALFPAD=triton.next_power_of_2(dim // 2),
        TRANSPOSED=transposed, num_warps=2,
    )  # fmt: skip
    return out_q, out_k


# -- sums of gradients ------------------------------------------------------------------------------------------------


@triton.jit
def _add(total, part, count, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    sum_ = tl.load(total + at, mask=inside) + tl.load(part + at, mask=inside).to(tl.float32)
    tl.store(total + at, sum_, mask=inside)


def add_in_place(total: Tensor, part: Tensor) -> None:
    """total += part, of contiguous tensors in float32 and in half precision. torch's own kernel for two types reaches a
    third of the memory's bandwidth."""
    count = total.numel()
    _add[(triton.cdiv(count, TILE),)](total, part, count, TILE=TILE, num_warps=8)
