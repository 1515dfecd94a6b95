"""The key-value cache, and attention over it for prefill and decode.

    KvCache     [layers, blocks, heads, size, dim], allocated once: on a GPU
    RowCache    [rows, heads, size, dim] for each layer, which can grow: on a CPU

Position p of a sequence is in its block p // size, at offset p % size. On a CPU a block is a row as long as a whole
sequence, and sequences occupy the first rows, so decoding reads the cache without a copy.

A freed block or row keeps its content until it is overwritten, and that may be NaN. Masking a score does not mask its
value, since 0 · NaN is NaN. So where keys and values are gathered, masked ones are zeroed (`Prefill`, `PagedDecode`,
the kernel). Where they are read in place (`Decode`), a row with non-finite content is cleared when its sequence leaves.

Shapes: B sequences, R rows, H query heads, K key heads, D head size, Q new tokens of a sequence, L cached tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def indices(values: Sequence[int], device: torch.device) -> Tensor:
    """On a GPU, copied without waiting for what is launched there."""
    made = torch.tensor(values)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


class KvCache:
    """A paged cache."""

    def __init__(self, blocks: int, size: int, layers: int) -> None:
        self.blocks = blocks
        self.size = size
        self.layers = layers
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def layer(self, number: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer. Allocated at the first call; `like` [·, K, ·, D] gives shape, type and device."""
        if self.keys is None or self.values is None:
            shape = (self.layers, self.blocks, like.shape[1], self.size, like.shape[-1])
            self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        return self.keys[number], self.values[number]

    def copy(self, pairs: Sequence[tuple[int, int]], columns: int | None = None) -> None:
        """Copy the first `columns` tokens from block to block, in every layer."""
        for slab in (self.keys, self.values) if pairs else ():
            if slab is not None:
                source, target = (indices(column, slab.device) for column in zip(*pairs, strict=True))
                slab[:, target, :, :columns] = slab[:, source, :, :columns]


class RowCache:
    """One row per sequence in the batch. All rows have room for the longest sequence."""

    def __init__(self) -> None:
        self.rows = 0
        self.size = 0
        self.slabs: dict[int, tuple[Tensor, Tensor]] = {}  # layer → keys, values

    def layer(self, number: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer. Allocated at the first call; `like` [·, K, ·, D] gives shape and type."""
        if number not in self.slabs:
            shape = (self.rows, like.shape[1], self.size, like.shape[-1])
            self.slabs[number] = like.new_zeros(shape), like.new_zeros(shape)
        return self.slabs[number]

    def grow(self, rows: int, size: int) -> None:
        """Grow the cache and keep its content. Layers grow one by one, so that only one is in memory twice."""
        self.rows, self.size = rows, size
        for number in self.slabs:
            self.slabs[number] = self._grown(self.slabs[number][0]), self._grown(self.slabs[number][1])

    def _grown(self, slab: Tensor) -> Tensor:
        larger = slab.new_zeros(self.rows, slab.shape[1], self.size, slab.shape[3])
        larger[: slab.shape[0], :, : slab.shape[2]] = slab
        return larger

    def clear(self, row: int) -> None:
        for keys, values in self.slabs.values():
            keys[row].zero_()
            values[row].zero_()

    def copy(self, pairs: Sequence[tuple[int, int]], columns: int) -> None:
        """Copy the first `columns` tokens from row to row, in every layer, all pairs at once: two rows can swap."""
        if pairs:
            source, target = (torch.tensor(column) for column in zip(*pairs, strict=True))
            for keys, values in self.slabs.values():
                for slab in (keys, values):
                    slab[target, :, :columns] = slab[source, :, :columns]


Cache = KvCache | RowCache


class Prefill:
    """Several new tokens of each sequence, padded on the right: written to the cache, with causal attention."""

    def __init__(self, cache: Cache, table_BN: Tensor, start_B: Tensor, length_B: Tensor, width: int) -> None:
        self.cache = cache
        self.table_BN = table_BN
        self.position_BQ = start_B[:, None] + torch.arange(width, device=start_B.device)
        self.valid_BQ = torch.arange(width, device=start_B.device) < length_B[:, None]
        self.starts_empty = not bool((start_B > 0).any())
        self.end_B = start_B + length_B
        self.span = int(self.end_B.max())
        row = torch.arange(len(start_B), device=start_B.device)[:, None].expand(self.position_BQ.shape)[self.valid_BQ]
        position = self.position_BQ[self.valid_BQ]
        self.block_T, self.offset_T = table_BN[row, position // cache.size], position % cache.size

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """[B, Q, H, D]"""
        keys, values = self.cache.layer(layer, k)
        keys[self.block_T, :, self.offset_T] = k.transpose(1, 2)[self.valid_BQ]
        values[self.block_T, :, self.offset_T] = v.transpose(1, 2)[self.valid_BQ]
        if self.starts_empty and window is None:
            # Padding is on the right, where causal attention does not reach.
            out = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            return out.transpose(1, 2)
        column = torch.arange(self.span, device=q.device)
        unused = (column >= self.end_B[:, None])[:, None, :, None]
        k, v = (self._context(slab).masked_fill(unused, 0) for slab in (keys, values))
        mask = column <= self.position_BQ[:, :, None]
        if window is not None:
            mask &= column > self.position_BQ[:, :, None] - window
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale).transpose(1, 2)

    def _context(self, slab: Tensor) -> Tensor:
        """All cached tokens of these sequences, [B, K, L, D]."""
        blocks = -(-self.span // self.cache.size)
        if blocks == 1:
            return slab[self.table_BN[:, 0], :, : self.span]
        return _contiguous(slab[self.table_BN[:, :blocks]])[:, :, : self.span]


class Decode:
    """One new token of each sequence, on a CPU. Sequence b is in row `row_B[b]` of the cache, in ascending order.
    Nothing is gathered: all rows up to the last one are computed, and the results of unused rows are ignored."""

    def __init__(self, cache: RowCache, row_B: Tensor, position_B: Tensor) -> None:
        self.cache = cache
        self.row_B = row_B
        self.position_B = position_B
        self.rows = int(row_B[-1]) + 1
        self.span = int(position_B.max()) + 1
        self.position_R = position_B.new_zeros(self.rows).index_copy(0, row_B, position_B)
        self._bias: dict[int | None, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """[B, 1, H, D]"""
        keys, values = self.cache.layer(layer, k)
        heads, dim = k.shape[1], k.shape[-1]
        keys[self.row_B, :, self.position_B] = k[:, :, 0]
        values[self.row_B, :, self.position_B] = v[:, :, 0]
        grouped = q.view(len(q), heads, -1, dim) * scale
        if self.rows > len(q):
            grouped = grouped.new_zeros(self.rows, *grouped.shape[1:]).index_copy(0, self.row_B, grouped)
        score = grouped @ keys[: self.rows, :, : self.span].transpose(-1, -2)
        weight = torch.softmax(score + self.bias(window, score), -1)
        out = weight @ values[: self.rows, :, : self.span]
        if self.rows > len(q):
            out = out[self.row_B]
        return out.reshape(len(q), 1, -1, dim)

    def bias(self, window: int | None, like: Tensor) -> Tensor:
        """−∞ at positions that a sequence does not have, or that are outside of its window, [R, 1, 1, L]."""
        if window not in self._bias:
            column = torch.arange(self.span, device=like.device)
            hidden = column > self.position_R[:, None]
            if window is not None:
                hidden |= column <= self.position_R[:, None] - window
            bias = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            self._bias[window] = bias.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._bias[window]


class PagedDecode:
    """One new token of each sequence, with its blocks gathered by plain torch: the reference of the Triton kernel, and
    its replacement without captured graphs."""

    def __init__(self, cache: KvCache, table_BN: Tensor, position_B: Tensor) -> None:
        self.cache = cache
        self.table_BN = table_BN
        self.position_B = position_B

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        keys, values = self.cache.layer(layer, k)
        row = torch.arange(len(q), device=q.device)
        block, offset = self.table_BN[row, self.position_B // self.cache.size], self.position_B % self.cache.size
        keys[block, :, offset] = k[:, :, 0]
        values[block, :, offset] = v[:, :, 0]
        column = torch.arange(self.table_BN.shape[1] * self.cache.size, device=q.device)
        hidden = column > self.position_B[:, None]
        if window is not None:
            hidden |= column <= self.position_B[:, None] - window
        k, v = (_contiguous(slab[self.table_BN]).masked_fill(hidden[:, None, :, None], 0) for slab in (keys, values))
        grouped = q.view(len(q), k.shape[1], -1, q.shape[-1])
        score = (grouped.float() @ k.float().transpose(-1, -2)) * scale
        weight = torch.softmax(score.masked_fill(hidden[:, None, None], float("-inf")), -1)
        return (weight @ v.float()).to(q.dtype).reshape(len(q), 1, -1, q.shape[-1])


def _contiguous(blocks: Tensor) -> Tensor:
    """[B, N, K, size, D] → [B, K, N · size, D]"""
    rows, count, heads, size, dim = blocks.shape
    return blocks.transpose(1, 2).reshape(rows, heads, count * size, dim)
