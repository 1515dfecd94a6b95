"""The engine's attention, put into a transformers model through its attention interface.

The model is called without a cache of its own: its layers hand queries, keys and values of the new tokens to `attend`,
which writes them into the engine's cache and reads what came before. No mask is made, since the name is unknown to
transformers' masks; the step at hand knows what each token sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "covey_engine"


class Step(Protocol):
    """What one forward pass does with the cache."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor: ...


class _Now:
    """The step at hand. One engine works at a time."""

    step: Step | None = None


_now = _Now()


def current_step() -> Any:
    assert _now.step is not None
    return _now.step


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
    assert softcap is None, "models with a soft cap are refused when they are opened"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return current_step().attend(module.layer_idx, query, key, value, scale, sliding_window), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


def backbone(model: Any) -> Any:
    """The layers without the output matrix, also where peft wraps the model."""
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model


@contextmanager
def engine_attention(model: Any, step: Step) -> Iterator[None]:
    """While this lasts, the model's attention is the engine's. The learner's comes back afterwards."""
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    config._attn_implementation = NAME
    _now.step = step
    try:
        yield
    finally:
        config._attn_implementation = before
        _now.step = None
