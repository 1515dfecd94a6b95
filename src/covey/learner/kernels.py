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


# -- attention --------------------------------------------------------------------------------------------------------


@triton.jit
def _merge(
    out, lse, other, other_lse, at, lse_stride, other_stride, H: tl.constexpr, HPAD: tl.constexpr, D: tl.constexpr,
    DPAD: tl.constexpr,
):  # fmt: skip
    """Token t of the answers: attention over its own segment and over its prompt, weighted by their sums of
    exponentials."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HPAD)
    d = tl.arange(0, DPAD)[None]
    own = tl.load(lse + h * lse_stride + at + t, mask=h < H, other=0.0)
    prompt = tl.load(other_lse + h * other_stride + t, mask=h < H, other=0.0)
    top = tl.maximum(own, prompt)
    both = top + tl.log(tl.exp(own - top) + tl.exp(prompt - top))
    share = tl.exp(prompt - both)[:, None]
    inside = (h < H)[:, None] & (d < D)
    place = t * H * D + h[:, None] * D + d
    mine = out + at * H * D + place
    x = tl.load(mine, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(other + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(mine, (x + share * (y - x)).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + h * lse_stride + at + t, both, mask=h < H)


def merge_in_place(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge attention over segments, out [T, H, D] with log-sums [H, T], with that of its last tokens over prompts."""
    tokens, heads, dim = out.shape
    assert out.is_contiguous() and other.is_contiguous() and lse.stride(1) == other_lse.stride(1) == 1
    _merge[(len(other),)](
        out, lse, other, other_lse, tokens - len(other), lse.stride(0), other_lse.stride(0), H=heads,
        HPAD=triton.next_power_of_2(heads), D=dim, DPAD=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip


@triton.jit
def _turn(
    x, more, out, t, row, adds, c1, c2, s1, s2, HEADS: tl.constexpr, PAD: tl.constexpr, HALF: tl.constexpr,
    HALFPAD: tl.constexpr, BACK: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Rotate the halves of the heads of token t; `BACK`: the transpose, after adding row `row` of `more`."""
    h = tl.arange(0, PAD)[:, None]
    d = tl.arange(0, HALFPAD)[None]
    inside = (h < HEADS) & (d < HALF)
    place = h * 2 * HALF + d
    a = tl.load(x + t * HEADS * 2 * HALF + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + t * HEADS * 2 * HALF + place + HALF, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        extra = more + row * HEADS * 2 * HALF + place
        there = (h < tl.where(adds, HEADS, 0)) & (d < HALF)
        a += tl.load(extra, mask=there, other=0.0).to(tl.float32)
        b += tl.load(extra + HALF, mask=there, other=0.0).to(tl.float32)
    if BACK:
        first, second = a * c1 + b * s2, b * c2 - a * s1
    else:
        first, second = a * c1 - b * s1, b * c2 + a * s2
    tl.store(out + t * HEADS * 2 * HALF + place, first.to(out.dtype.element_ty), mask=inside)
    tl.store(out + t * HEADS * 2 * HALF + place + HALF, second.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    q, k, more_q, more_k, cos, sin, out_q, out_k, at, H: tl.constexpr, HPAD: tl.constexpr, K: tl.constexpr,
    KPAD: tl.constexpr, HALF: tl.constexpr, HALFPAD: tl.constexpr, BACK: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """All heads of token t. `more_q` is of the tokens from `at` on, `more_k` of those before."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALFPAD)[None]
    turn = t * 2 * HALF + d
    c1 = tl.load(cos + turn, mask=d < HALF, other=0.0).to(tl.float32)
    c2 = tl.load(cos + turn + HALF, mask=d < HALF, other=0.0).to(tl.float32)
    s1 = tl.load(sin + turn, mask=d < HALF, other=0.0).to(tl.float32)
    s2 = tl.load(sin + turn + HALF, mask=d < HALF, other=0.0).to(tl.float32)
    _turn(q, more_q, out_q, t, t - at, t >= at, c1, c2, s1, s2, H, HPAD, HALF, HALFPAD, BACK, ADDS)
    _turn(k, more_k, out_k, t, t, t < at, c1, c2, s1, s2, K, KPAD, HALF, HALFPAD, BACK, ADDS)


def _launch_rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, out: tuple[Tensor, Tensor], back: bool, more: list[Tensor] | None
) -> None:
    tokens, heads, dim = q.shape
    kv = k.shape[1]
    more_q, more_k, *_ = more or (q, k)
    at = 0 if more is None else len(more_k)
    assert all(x.is_contiguous() for x in (q, k, more_q, more_k, *out))
    _rotate[(tokens,)](
        q, k, more_q, more_k, cos.contiguous(), sin.contiguous(), *out, at, H=heads,
        HPAD=triton.next_power_of_2(heads), K=kv, KPAD=triton.next_power_of_2(kv), HALF=dim // 2,
        HALFPAD=triton.next_power_of_2(dim // 2), BACK=back, ADDS=more is not None, num_warps=2,
    )  # fmt: skip


def rotate_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`attention.rotated` of queries [T, H, D] and keys [T, K, D]."""
    q, k = q.contiguous(), k.contiguous()
    out = torch.empty_like(q), torch.empty_like(k)
    _launch_rotate(q, k, cos, sin, out, False, None)
    return out


def rotate_back(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, more: list[Tensor] | None) -> tuple[Tensor, Tensor]:
    """Gradients before the rotation from those after it, in place. `more` is added first: gradients of the last queries
    and of the first keys, which together are as many as the tokens."""
    dq, dk = dq.contiguous(), dk.contiguous()
    more = None if more is None else [x.contiguous() for x in more[:2]]
    _launch_rotate(dq, dk, cos, sin, (dq, dk), True, more)
    return dq, dk


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
