"""A key-value cache that is allocated once: decoding writes into it, nothing is concatenated.

Rows are left-padded to one width, so a single column number says where every row writes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlabLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, capacity, dim]; `used` columns are filled."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.used = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, _ = key_states.shape
        self.keys = key_states.new_empty(rows, heads, self.capacity, key_states.shape[-1])
        self.values = value_states.new_empty(rows, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.used + key_states.shape[2]
        assert end <= self.capacity, "the cache is allocated for prompt + max_tokens"
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length  # its name in transformers before 5.20

    def take(self, rows: Tensor, capacity: int) -> SlabLayer:
        """A new layer of `capacity` columns whose rows are copies of these."""
        taken = SlabLayer(capacity)
        taken.lazy_initialization(self.keys[rows, :, :0], self.values[rows, :, :0])
        taken.keys[:, :, : self.used] = self.keys[rows, :, : self.used]
        taken.values[:, :, : self.used] = self.values[rows, :, : self.used]
        taken.used = self.used
        return taken


def new_cache(layers: int, capacity: int) -> Cache:
    return Cache(layers=[SlabLayer(capacity) for _ in range(layers)])


def take_rows(cache: Cache, rows: Tensor, capacity: int) -> Cache:
    """The cache of a new batch made of rows of this one: a group's prompt is given to all its answers."""
    return Cache(layers=[layer.take(rows, capacity) for layer in cache.layers])


def cache_layers(config: Any) -> int:
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def indices(chosen: list[bool]) -> Tensor:
    return torch.tensor([row for row, on in enumerate(chosen) if on], dtype=torch.int64)
