"""Triton kernels of the engine on a GPU: write to and attend over the paged cache, and sample a token.

Imported only if a GPU is used. `Prefill`, `PagedDecode` (cache.py) and `draw` (runner.py) compute the same in plain
torch. A row at position −1 is idle: it writes nothing, attends to nothing, and samples nothing.

Shapes: B sequences, T prompt tokens, I tiles of `TILE` prompt tokens, H query heads, K key heads, G = H / K,
D head size, S splits of a sequence, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16  # prompt tokens of one sequence that one program attends with


@triton.jit
def _normed(x, other, weight, other_weight, eps, D: tl.constexpr):
    """RMSNorm over the head size, of [heads, D] and of the same with swapped halves."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    return x * scale * weight, other * scale * other_weight


@triton.jit
def _rotated(
    x, stride, cos, sin, norm, eps, rows, d, ROWS: tl.constexpr, D: tl.constexpr, ROTATES: tl.constexpr,
    NORMS: tl.constexpr,
):  # fmt: skip
    """Heads of one token, [heads, D] in float32, with norm and rotary embedding if the layer has them."""
    inside = (rows < ROWS)[:, None] & (d < D)[None]
    rotated = tl.load(x + rows[:, None] * stride + d[None], mask=inside, other=0.0).to(tl.float32)
    if ROTATES:
        swapped = tl.where(d < D // 2, d + D // 2, d - D // 2)
        other = tl.load(x + rows[:, None] * stride + swapped[None], mask=inside, other=0.0).to(tl.float32)
        if NORMS:
            weight = tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)[None]
            other_weight = tl.load(norm + swapped, mask=d < D, other=0.0).to(tl.float32)[None]
            rotated, other = _normed(rotated, other, weight, other_weight, eps, D)
        c = tl.load(cos + d, mask=d < D, other=0.0).to(tl.float32)[None]
        s = tl.load(sin + d, mask=d < D, other=0.0).to(tl.float32)[None]
        rotated = rotated * c + other * tl.where(d < D // 2, -1.0, 1.0)[None] * s
    return rotated


@triton.jit
def _write(
    k, v, cos, sin, norm, keys, values, table, position, k_stride, v_stride, turn_stride, table_stride, eps,
    K: tl.constexpr, KPAD: tl.constexpr, D: tl.constexpr, DPAD: tl.constexpr, SIZE: tl.constexpr,
    ROTATES: tl.constexpr, NORMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the key and value of prompt token b, all heads, to the cache. A row of the table serves a tile."""
    b = tl.program_id(0)
    position_b = tl.load(position + b)
    at = tl.maximum(position_b, 0)
    block = tl.load(table + (b // TILE) * table_stride + at // SIZE).to(tl.int64)
    h = tl.arange(0, KPAD)
    d = tl.arange(0, DPAD)
    inside = (h < tl.where(position_b >= 0, K, 0))[:, None] & (d < D)[None]
    target = (block * K + h[:, None]) * SIZE * D + (at % SIZE) * D + d[None]
    k_hd = _rotated(
        k + b * k_stride, D, cos + b * turn_stride, sin + b * turn_stride, norm, eps, h, d, K, D, ROTATES, NORMS
    )
    v_hd = tl.load(v + b * v_stride + h[:, None] * D + d[None], mask=inside, other=0.0)
    tl.store(keys + target, k_hd.to(keys.dtype.element_ty), mask=inside)
    tl.store(values + target, v_hd, mask=inside)


@triton.jit
def _attend(
    q, k, v, cos, sin, norm, k_norm, keys, values, table, position, out, part, part_m, part_l, scale, window, q_stride,
    k_stride, v_stride, turn_stride, table_stride, eps,
    K: tl.constexpr, G: tl.constexpr, GPAD: tl.constexpr, D: tl.constexpr, DPAD: tl.constexpr, SIZE: tl.constexpr,
    SPLITS: tl.constexpr, ROTATES: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Sequence b, key head h, one split of its blocks: softmax(q·k) v of the G query heads, online. The last split has
    the new token too, and writes its key and value to the cache."""
    b, h, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position_b = tl.load(position + b)
    cached = tl.maximum(position_b, 0)
    lowest = tl.where(window > 0, tl.maximum(position_b + 1 - window, 0), 0)
    first = lowest // SIZE
    last = tl.cdiv(cached, SIZE)
    each = tl.cdiv(last - first, SPLITS)
    start = first + s * each
    end = tl.minimum(start + each, last)
    g = tl.arange(0, GPAD)
    d = tl.arange(0, DPAD)
    n = tl.arange(0, SIZE)
    q_gd = _rotated(
        q + b * q_stride + h * G * D, D, cos + b * turn_stride, sin + b * turn_stride, norm, eps, g, d, G, D, ROTATES,
        NORMS,
    ).to(keys.dtype.element_ty)  # fmt: skip
    m = tl.full([GPAD], float("-inf"), tl.float32)
    total = tl.zeros([GPAD], tl.float32)
    acc = tl.zeros([GPAD, DPAD], tl.float32)
    for i in range(start, end):
        block = tl.load(table + b * table_stride + i).to(tl.int64)
        base = (block * K + h) * SIZE * D
        tile = base + n[:, None] * D + d[None]
        column = i * SIZE + n
        seen = (column >= lowest) & (column < cached)
        # Masked positions may hold NaN of an earlier sequence, and 0 · NaN is NaN: so they are not loaded at all.
        inside = seen[:, None] & (d < D)[None]
        k_nd = tl.load(keys + tile, mask=inside, other=0.0)
        score = tl.dot(q_gd, tl.trans(k_nd), input_precision="ieee") * scale
        score = tl.where(seen[None], score, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, 1))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(score - safe[:, None])
        shrink = tl.exp(m - safe)
        v_nd = tl.load(values + tile, mask=inside, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v_nd.dtype), v_nd, input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        m = m_new
    if s == SPLITS - 1:
        only = tl.arange(0, 1)
        k_1d = _rotated(
            k + b * k_stride + h * D, D, cos + b * turn_stride, sin + b * turn_stride, k_norm, eps, only, d, 1, D,
            ROTATES, NORMS,
        ).to(keys.dtype.element_ty)  # fmt: skip
        writes = (d < tl.where(position_b >= 0, D, 0))[None]
        v_1d = tl.load(v + b * v_stride + h * D + d[None], mask=writes, other=0.0)
        block = tl.load(table + b * table_stride + cached // SIZE).to(tl.int64)
        place = (block * K + h) * SIZE * D + (cached % SIZE) * D + d[None]
        tl.store(keys + place, k_1d, mask=writes)
        tl.store(values + place, v_1d, mask=writes)
        new = tl.sum(q_gd.to(tl.float32) * k_1d.to(tl.float32), 1) * scale
        new = tl.where(position_b >= 0, new, float("-inf"))
        m_new = tl.maximum(m, new)
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p_new = tl.exp(new - safe)
        shrink = tl.exp(m - safe)
        acc = acc * shrink[:, None] + p_new[:, None] * v_1d.to(tl.float32)
        total = total * shrink + p_new
        m = m_new
    head = b * K * G + h * G + g
    if SPLITS == 1:
        result = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(
            out + head[:, None] * D + d[None], result.to(out.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None]
        )
    else:
        tl.store(part + (head * SPLITS + s)[:, None] * D + d[None], acc, mask=(g < G)[:, None] & (d < D)[None])
        tl.store(part_m + head * SPLITS + s, m, mask=g < G)
        tl.store(part_l + head * SPLITS + s, total, mask=g < G)


@triton.jit
def _combine(part, part_m, part_l, out, D: tl.constexpr, DPAD: tl.constexpr, SPLITS: tl.constexpr):
    """Combine the splits of one query head."""
    head = tl.program_id(0)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, DPAD)
    m = tl.load(part_m + head * SPLITS + s)
    peak = tl.max(m, 0)
    weight = tl.exp(m - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weight * tl.load(part_l + head * SPLITS + s), 0)
    acc = tl.load(part + (head * SPLITS + s)[:, None] * D + d[None], mask=(d < D)[None], other=0.0)
    result = tl.sum(acc * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + head * D + d, result.to(out.dtype.element_ty), mask=d < D)


def splits_for(sequences: int, heads: int, processors: int) -> int:
    """Enough programs to fill the GPU; a power of two."""
    programs = 2 * processors / max(1, sequences * heads)
    return min(32, 1 << max(0, int(programs).bit_length() - 1 + (programs > 1)))


@torch.library.custom_op("covey::paged_attention", mutates_args=("keys", "values"))
def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: int,
    table: Tensor,
    position: Tensor,
    scale: float,
    window: int,
    splits: int,
) -> Tensor:
    """One new token of each sequence: q [B, H, 1, D], k and v [B, K, 1, D] → [B, 1, H, D]. `window` 0: no window."""
    rows, heads = q.shape[:2]
    q, k, v = (x.reshape(rows, -1) for x in (q, k, v))
    return _launch(q, k, v, None, None, keys[layer], values[layer], table, position, heads, scale, window, splits, 0.0)


@torch.library.custom_op("covey::fused_attention", mutates_args=("keys", "values"))
def fused_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: Tensor | None,
    keys: Tensor,
    values: Tensor,
    layer: int,
    table: Tensor,
    position: Tensor,
    scale: float,
    window: int,
    splits: int,
    eps: float,
) -> Tensor:
    """The same from the fused product [B, (H + 2K) D] and the rotary embedding of each position, [B, D]. With `norms`
    [2, D] queries and keys are normalised first."""
    kv, dim = keys.shape[2], keys.shape[4]
    heads = qkv.shape[1] // dim - 2 * kv
    q, k, v = qkv.split([heads * dim, kv * dim, kv * dim], 1)
    slabs = (keys[layer], values[layer])
    return _launch(q, k, v, (cos, sin), norms, *slabs, table, position, heads, scale, window, splits, eps)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: tuple[Tensor, Tensor] | None,
    norms: Tensor | None,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    position: Tensor,
    heads: int,
    scale: float,
    window: int,
    splits: int,
    eps: float,
) -> Tensor:
    _, kv, size, dim = keys.shape
    rows, groups, pad = len(q), heads // kv, max(16, triton.next_power_of_2(dim))
    cos, sin = (q, q) if turn is None else turn
    q_norm, k_norm = (q, q) if norms is None else norms
    kind = {"ROTATES": turn is not None, "NORMS": norms is not None}
    out = torch.empty(rows, 1, heads, dim, dtype=q.dtype, device=q.device)
    if splits > 1:
        part = torch.empty(rows * heads, splits, dim, dtype=torch.float32, device=q.device)
        part_m, part_l = torch.empty(2, rows * heads, splits, dtype=torch.float32, device=q.device)
    else:
        part = part_m = part_l = out
    _attend[(rows, kv, splits)](
        q, k, v, cos, sin, q_norm, k_norm, keys, values, table, position, out, part, part_m, part_l, scale, window,
        q.stride(0), k.stride(0), v.stride(0), cos.stride(0), table.stride(0), eps, K=kv, G=groups,
        GPAD=max(16, triton.next_power_of_2(groups)), D=dim, DPAD=pad, SIZE=size, SPLITS=splits, num_warps=4, **kind,
    )  # fmt: skip
    if splits > 1:
        _combine[(rows * heads,)](part, part_m, part_l, out, D=dim, DPAD=pad, SPLITS=splits)
    return out


@paged_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, layer: int, table: Tensor, position: Tensor,
    scale: float, window: int, splits: int,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3])


@fused_attention.register_fake
def _(
    qkv: Tensor, cos: Tensor, sin: Tensor, norms: Tensor | None, keys: Tensor, values: Tensor, layer: int,
    table: Tensor, position: Tensor, scale: float, window: int, splits: int, eps: float,
) -> Tensor:  # fmt: skip
    kv, dim = keys.shape[2], keys.shape[4]
    return qkv.new_empty(qkv.shape[0], 1, qkv.shape[1] // dim - 2 * kv, dim)


# -- prompts --------------------------------------------------------------------------------------------------------


@triton.jit
def _rotate(
    q, cos, sin, norm, out, q_stride, turn_stride, eps,
    H: tl.constexpr, HPAD: tl.constexpr, D: tl.constexpr, DPAD: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Norm and rotary embedding of the queries of token b."""
    b = tl.program_id(0)
    h = tl.arange(0, HPAD)
    d = tl.arange(0, DPAD)
    q_hd = _rotated(
        q + b * q_stride, D, cos + b * turn_stride, sin + b * turn_stride, norm, eps, h, d, H, D, True, NORMS
    )
    tl.store(
        out + (b * H + h[:, None]) * D + d[None], q_hd.to(out.dtype.element_ty), mask=(h < H)[:, None] & (d < D)[None]
    )


@triton.jit
def _attend_prompt(
    q, keys, values, table, position, out, scale, window, q_stride, table_stride,
    K: tl.constexpr, G: tl.constexpr, GPAD: tl.constexpr, D: tl.constexpr, DPAD: tl.constexpr, SIZE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Tile i of prompt tokens, key head h: each token attends to the cached tokens up to its own position, online.
    Row r of the tile is token r // GPAD and query head r % GPAD of the group."""
    i, h = tl.program_id(0), tl.program_id(1)
    position_q = tl.load(position + i * TILE + tl.arange(0, TILE))
    last = tl.max(position_q, 0) + 1
    earliest = tl.min(tl.where(position_q >= 0, position_q, last), 0)
    lowest = tl.where(window > 0, tl.maximum(earliest + 1 - window, 0), 0)
    r = tl.arange(0, TILE * GPAD)
    token, g = i * TILE + r // GPAD, r % GPAD
    position_r = tl.load(position + token)
    before_r = tl.where(window > 0, position_r - window, -1)
    d = tl.arange(0, DPAD)
    n = tl.arange(0, SIZE)
    row = (token * q_stride + (h * G + g) * D)[:, None] + d[None]
    used = ((g < G) & (position_r >= 0))[:, None] & (d < D)[None]
    q_rd = tl.load(q + row, mask=used, other=0.0)
    m = tl.full([TILE * GPAD], float("-inf"), tl.float32)
    total = tl.zeros([TILE * GPAD], tl.float32)
    acc = tl.zeros([TILE * GPAD, DPAD], tl.float32)
    for number in range(lowest // SIZE, tl.cdiv(last, SIZE)):
        block = tl.load(table + i * table_stride + number).to(tl.int64)
        tile = (block * K + h) * SIZE * D + n[:, None] * D + d[None]
        column = number * SIZE + n
        inside = ((column >= lowest) & (column < last))[:, None] & (d < D)[None]
        k_nd = tl.load(keys + tile, mask=inside, other=0.0)
        score = tl.dot(q_rd, tl.trans(k_nd), input_precision="ieee") * scale
        seen = (column[None] <= position_r[:, None]) & (column[None] > before_r[:, None])
        score = tl.where(seen, score, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, 1))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(score - safe[:, None])
        shrink = tl.exp(m - safe)
        v_nd = tl.load(values + tile, mask=inside, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v_nd.dtype), v_nd, input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        m = m_new
    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    target = ((token * K + h) * G + g)[:, None] * D + d[None]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None])


@torch.library.custom_op("covey::paged_prefill", mutates_args=("keys", "values"))
def paged_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: int,
    table: Tensor,
    position: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """Prompt tokens: q [T, H, 1, D], k and v [T, K, 1, D] → [T, 1, H, D]. The tokens of a tile are of one sequence,
    whose blocks are a row of the table [I, N]. All keys are written before any token attends, so a sequence may go
    through several tiles, and share blocks with an earlier one."""
    rows, heads = q.shape[:2]
    q, k, v = (x.reshape(rows, -1) for x in (q, k, v))
    return _launch_prompt(q, k, v, None, None, keys[layer], values[layer], table, position, heads, scale, window, 0.0)


@torch.library.custom_op("covey::fused_prefill", mutates_args=("keys", "values"))
def fused_prefill(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: Tensor | None,
    keys: Tensor,
    values: Tensor,
    layer: int,
    table: Tensor,
    position: Tensor,
    scale: float,
    window: int,
    eps: float,
) -> Tensor:
    """The same from the fused product [T, (H + 2K) D] and the rotary embedding of each position, [T, D]."""
    kv, dim = keys.shape[2], keys.shape[4]
    heads = qkv.shape[1] // dim - 2 * kv
    q, k, v = qkv.split([heads * dim, kv * dim, kv * dim], 1)
    slabs = (keys[layer], values[layer])
    return _launch_prompt(q, k, v, (cos, sin), norms, *slabs, table, position, heads, scale, window, eps)


def _launch_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: tuple[Tensor, Tensor] | None,
    norms: Tensor | None,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    position: Tensor,
    heads: int,
    scale: float,
    window: int,
    eps: float,
) -> Tensor:
    _, kv, size, dim = keys.shape
    tokens, groups, pad = len(q), heads // kv, max(16, triton.next_power_of_2(dim))
    cos, sin = (q, q) if turn is None else turn
    q_norm, k_norm = (q, q) if norms is None else norms
    _write[(tokens,)](
        k, v, cos, sin, k_norm, keys, values, table, position, k.stride(0), v.stride(0), cos.stride(0), table.stride(0),
        eps, K=kv, KPAD=triton.next_power_of_2(kv), D=dim, DPAD=pad, SIZE=size, ROTATES=turn is not None,
        NORMS=norms is not None, TILE=TILE, num_warps=1 if kv * dim <= 256 else 4,
    )  # fmt: skip
    if turn is not None:
        rotated = torch.empty(tokens, heads * dim, dtype=q.dtype, device=q.device)
        _rotate[(tokens,)](
            q, cos, sin, q_norm, rotated, q.stride(0), cos.stride(0), eps, H=heads, HPAD=triton.next_power_of_2(heads),
            D=dim, DPAD=pad, NORMS=norms is not None, num_warps=4,
        )  # fmt: skip
        q = rotated
    out = torch.empty(tokens, 1, heads, dim, dtype=q.dtype, device=q.device)
    group_pad = triton.next_power_of_2(groups)
    _attend_prompt[(tokens // TILE, kv)](
        q, keys, values, table, position, out, scale, window, q.stride(0), table.stride(0), K=kv, G=groups,
        GPAD=group_pad, D=dim, DPAD=pad, SIZE=size, TILE=TILE, num_warps=4 if TILE * group_pad * pad <= 8192 else 8,
    )  # fmt: skip
    return out


@paged_prefill.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, layer: int, table: Tensor, position: Tensor,
    scale: float, window: int,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3])


@fused_prefill.register_fake
def _(
    qkv: Tensor, cos: Tensor, sin: Tensor, norms: Tensor | None, keys: Tensor, values: Tensor, layer: int,
    table: Tensor, position: Tensor, scale: float, window: int, eps: float,
) -> Tensor:  # fmt: skip
    kv, dim = keys.shape[2], keys.shape[4]
    return qkv.new_empty(qkv.shape[0], 1, qkv.shape[1] // dim - 2 * kv, dim)


# -- sampling -------------------------------------------------------------------------------------------------------


@triton.jit
def _scan(logits, temperature, top, mass, best, stride, V, TILES: tl.constexpr, TILE: tl.constexpr):
    """Of one tile of a row: the largest logit, the sum of exponentials relative to it, and its position."""
    b, t = tl.program_id(0), tl.program_id(1)
    lane = t * TILE + tl.arange(0, TILE)
    heat = tl.load(temperature + b)
    x = tl.load(logits + b.to(tl.int64) * stride + lane, mask=lane < V, other=float("-inf")).to(tl.float32)
    x = x / tl.where(heat > 0, heat, 1.0)
    known = tl.where(x == x, x, float("-inf"))  # devices disagree about the argmax of NaN
    m = tl.max(known, 0)
    tl.store(top + b * TILES + t, m)
    tl.store(mass + b * TILES + t, tl.sum(tl.exp(x - m), 0))
    tl.store(best + b * TILES + t, t * TILE + tl.argmax(known, 0))


@triton.jit
def _pick(
    logits, temperature, uniform, ends, limit, top, mass, best, ids, position, step, out_ids, out_logprobs, stride, V,
    uniform_stride, out_stride, TILES: tl.constexpr, TILES_PAD: tl.constexpr, TILE: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Invert the cumulative distribution of row b at its uniform number: the tile first, then the token. A row that
    samples an end token, or whose next position is its limit, becomes idle. An idle row outputs token −1."""
    b = tl.program_id(0)
    now = tl.load(step + b)
    position_b = tl.load(position + b)
    heat = tl.load(temperature + b)
    t = tl.arange(0, TILES_PAD)
    m = tl.load(top + b * TILES + t, mask=t < TILES, other=float("-inf"))
    peak = tl.max(m, 0)
    weight = tl.load(mass + b * TILES + t, mask=t < TILES, other=0.0) * tl.exp(m - peak)
    total = tl.sum(weight, 0)
    target = tl.load(uniform + b * uniform_stride + now) * total
    # The partial sums of a parallel scan are rounded differently and need not increase. So take the first position
    # above the target that has any probability, never the number of positions below it. If rounding puts the target
    # above all of them, take the most likely one.
    sums = tl.cumsum(weight, 0)
    tile = tl.min(tl.where((sums > target) & (weight > 0), t, TILES_PAD), 0)
    tile = tl.where(tile < TILES, tile, tl.argmax(tl.where(weight == weight, weight, 0.0), 0))
    before = tl.sum(tl.where(t < tile, weight, 0.0), 0)
    lane = tl.arange(0, TILE)
    at = tile * TILE + lane
    x = tl.load(logits + b.to(tl.int64) * stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    x = x / tl.where(heat > 0, heat, 1.0)
    p = tl.exp(x - peak)
    inside = tl.min(tl.where((before + tl.cumsum(p, 0) > target) & (p > 0), lane, TILE), 0)
    inside = tl.where(inside < TILE, inside, tl.argmax(tl.where(p == p, p, 0.0), 0))
    logprob = tl.sum(tl.where(lane == inside, x, 0.0), 0) - peak - tl.log(total)
    token = tile * TILE + inside
    likeliest = tl.sum(tl.where(t == tl.argmax(m, 0), tl.load(best + b * TILES + t, mask=t < TILES, other=0), 0), 0)
    token = tl.where(heat > 0, token, likeliest)
    # If logits are not finite, the log-prob is not finite either; the token is meaningless but must be a valid id.
    token = tl.minimum(tl.maximum(token, 0), V - 1)
    logprob = tl.where(heat > 0, logprob, total - total)
    token = token.to(tl.int64)
    ended = tl.max((tl.load(ends + tl.arange(0, ENDS)) == token).to(tl.int32), 0) > 0
    ended = ended | (position_b + 1 >= tl.load(limit + b)) | (position_b < 0)
    tl.store(ids + b, token)
    tl.store(out_ids + b * out_stride + now, tl.where(position_b < 0, -1, token))
    tl.store(out_logprobs + b * out_stride + now, logprob)
    tl.store(position + b, tl.where(ended, -1, position_b + 1))
    tl.store(step + b, now + 1)


def draw_and_advance(
    logits_BV: Tensor,
    temperature_B: Tensor,
    uniform_BT: Tensor,
    end_E: Tensor,
    limit_B: Tensor,
    ids_B: Tensor,
    position_B: Tensor,
    step_B: Tensor,
    out_ids_BT: Tensor,
    out_logprobs_BT: Tensor,
    tile: int = 4096,
) -> None:
    """Sample a token for every row with the uniform number of its step, store it with its log-prob, and advance: all in
    place, so that a captured step can be replayed. Temperature 0 is greedy, with log-prob 0. `end_E`: the tokens that
    end a completion, a power of two of them, filled up with −1. `limit_B`: the position at which a row ends."""
    rows, vocabulary = logits_BV.shape
    tiles = triton.cdiv(vocabulary, tile)
    top, mass = torch.empty(2, rows, tiles, dtype=torch.float32, device=logits_BV.device)
    best = torch.empty(rows, tiles, dtype=torch.int32, device=logits_BV.device)
    _scan[(rows, tiles)](
        logits_BV, temperature_B, top, mass, best, logits_BV.stride(0), vocabulary, TILES=tiles, TILE=tile, num_warps=8
    )
    _pick[(rows,)](
        logits_BV, temperature_B, uniform_BT, end_E, limit_B, top, mass, best, ids_B, position_B, step_B, out_ids_BT,
        out_logprobs_BT, logits_BV.stride(0), vocabulary, uniform_BT.stride(0), out_ids_BT.stride(0),
        TILES=tiles, TILES_PAD=triton.next_power_of_2(tiles), TILE=tile, ENDS=len(end_E), num_warps=8,
    )  # fmt: skip
