"""The engine's attention, plugged into a transformers model through its attention interface.

The model is called without a cache of its own: its layers pass the queries, keys and values of the new tokens to
`attend`, which writes them to the engine's cache and attends to the cached tokens. transformers builds no mask for an
attention it does not know; the current step masks by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from covey.models.families import causal_lm, window_of

NAME = "covey_engine"


class Step(Protocol):
    """The attention of one forward pass over the cache: `Prefill`, `Decode` or `PagedDecode`, or the step of a
    CUDA graph (`PrefillStep`, `DecodeStep`)."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor: ...


class _Current:
    """The step of the forward pass in progress. One engine runs at a time."""

    step: Step | None = None


_current = _Current()


def current_step() -> Any:
    assert _current.step is not None
    return _current.step


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    assert softcap is None, "models with a soft cap are rejected when they are loaded"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = window_of(module, sliding_window)
    return current_step().attend(module.layer_idx, query, key, value, scale, window), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


def backbone(model: Any) -> Any:
    """The model without the output matrix."""
    return causal_lm(model).base_model


@contextmanager
def engine_attention(model: Any, step: Step) -> Iterator[None]:
    """Use the engine's attention in this context, and restore the learner's afterwards."""
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    config._attn_implementation = NAME
    _current.step = step
    try:
        yield
    finally:
        config._attn_implementation = before
        _current.step = None
