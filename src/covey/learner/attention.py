"""Attention over packed sequences, plugged into transformers models through their attention interface.

    prompt 1   prompt 2  │ answer 1.1   answer 1.2   answer 2.1

Each token attends causally within its own segment (a prompt or an answer); a token of an answer also attends to its
whole prompt. `packed_attention(layout)` sets the sequence that the model is computing; it must stay open until the
backward pass has finished. Without it the model uses transformers' own `sdpa`.

    SDPA    any device, any precision, sliding windows: scaled dot products, chunk by chunk
    FLASH   bfloat16 or float16 on a GPU: flash attention over segments and over prompts, combined by their log-sums

Shapes: T tokens of the packed sequence, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from covey.models.families import window_of

SDPA, FLASH = "covey_packed", "covey_packed_fast"
CHUNK = 128  # tokens of answers in one call of scaled_dot_product_attention


@dataclass(frozen=True)
class Chunk:
    """Consecutive segments, and the prompt that they continue (None for a prompt itself)."""

    segments: tuple[int, ...]
    prompt: int | None = None

    @property
    def length(self) -> int:
        return sum(self.segments)


@dataclass(frozen=True)
class Layout:
    """Lengths of prompts and of the answers to each, in the order of the packed sequence."""

    prompts: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    # Cumulative lengths for flash attention: of segments, of the answers of each prompt together, of prompts.
    cu_seqlens: tuple[Tensor, Tensor, Tensor] | None = None
    masks: dict[tuple[int, int | None, torch.dtype], Tensor] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, prompts: Sequence[int], answers: Sequence[Sequence[int]]) -> Layout:
        return cls(tuple(prompts), tuple(map(tuple, answers)))

    def to(self, device: torch.device, non_blocking: bool = False) -> Layout:
        """On a GPU, with the cumulative lengths that flash attention needs."""
        if device.type != "cuda":
            return self
        segments = [n for n in (*self.prompts, *(n for group in self.answers for n in group)) if n]
        lengths = (segments, [sum(group) for group in self.answers], self.prompts)
        ends = [torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in lengths]
        segment_ends, answer_ends, prompt_ends = (end.to(device, non_blocking=non_blocking) for end in ends)
        return Layout(self.prompts, self.answers, (segment_ends, answer_ends, prompt_ends))

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompts)

    @property
    def longest_segment(self) -> int:
        return max(*self.prompts, *(n for group in self.answers for n in group))

    @property
    def longest_row(self) -> int:
        return max(p + max(group) for p, group in zip(self.prompts, self.answers, strict=True))

    @cached_property
    def chunks(self) -> list[Chunk]:
        """One chunk per prompt, then the answers to each prompt in chunks of about CHUNK tokens."""
        chunks = [Chunk((length,)) for length in self.prompts]
        for prompt, group in enumerate(self.answers):
            segments: list[int] = []
            for length in group:
                if segments and sum(segments) + length > CHUNK:
                    chunks.append(Chunk(tuple(segments), prompt))
                    segments = []
                segments.append(length)
            chunks.append(Chunk(tuple(segments), prompt))
        return [chunk for chunk in chunks if chunk.length]

    def mask(self, index: int, chunk: Chunk, window: int | None, like: Tensor) -> Tensor:
        """The attention mask of a chunk over its prompt and itself, [queries, keys]: 0 or −∞ in the precision of the
        scores. Computed once for all layers, each of which would make and keep its own from a mask of booleans."""
        key = (index, window, like.dtype)
        if key not in self.masks:
            before = 0 if chunk.prompt is None else self.prompts[chunk.prompt]
            segment = torch.repeat_interleave(torch.tensor(chunk.segments))
            position = torch.cat([torch.arange(before, before + n) for n in chunk.segments])
            keys = torch.cat([torch.arange(before), position])
            same = torch.cat([torch.ones(len(segment), before, dtype=torch.bool), segment[:, None] == segment], 1)
            visible = same & (keys <= position[:, None])
            if window is not None:
                visible &= keys > position[:, None] - window
            hidden = torch.zeros(visible.shape, dtype=like.dtype).masked_fill_(~visible, float("-inf"))
            self.masks[key] = hidden.to(like.device)
        return self.masks[key]


@dataclass
class State:
    """The packed sequence in progress, and how many attention layers have used it. The learner runs one at a time."""

    layout: Layout | None = None
    layers: int = 0


_state = State()


@contextmanager
def packed_attention(layout: Layout) -> Iterator[State]:
    before = _state.layout
    _state.layout, _state.layers = layout, 0
    try:
        yield _state
    finally:
        _state.layout = before


def select_attention(lm: Any, layout: Layout) -> bool:
    """Set the model's attention for this packed sequence. True if it is flash attention."""
    config = lm.config.get_text_config(decoder=True)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    fits = window is None or layout.longest_row <= window
    half = lm.get_input_embeddings().weight.dtype in (torch.bfloat16, torch.float16)
    flash = layout.cu_seqlens is not None and half and dim % 8 == 0 and dim <= 256 and fits
    config._attn_implementation = FLASH if flash else SDPA
    return flash


def sdpa_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """[1, H, T, D] → [1, T, H, D]"""
    layout = _state.layout
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)
    _state.layers += 1
    sliding_window = window_of(module, sliding_window)
    chunks = layout.chunks
    sizes = [chunk.length for chunk in chunks]
    queries, keys, values = (x.split(sizes, 2) for x in (query, key, value))
    outputs = []
    for index, chunk in enumerate(chunks):
        k, v, q = keys[index], values[index], queries[index]
        if chunk.prompt is not None:
            k, v = torch.cat((keys[chunk.prompt], k), 2), torch.cat((values[chunk.prompt], v), 2)
        causal = chunk.prompt is None and sliding_window is None
        mask = None if causal else layout.mask(index, chunk, sliding_window, q)
        outputs.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
        )
    return torch.cat([out.transpose(1, 2) for out in outputs], 1), None  # contiguous, for models that take views of it


def flash_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Not x[0], whose gradient is a padded copy.
    out, _lse = torch.ops.covey_learner.attend(*(x.squeeze(0).transpose(0, 1) for x in (query, key, value)), scale)
    return out[None], None


def _mask(**arguments: Any) -> Tensor | None:
    """No mask for a packed sequence: its layout replaces it."""
    mask: Tensor | None = None if _state.layout is not None else sdpa_mask(**arguments)
    return mask


for _name, _function in ((SDPA, sdpa_attention), (FLASH, flash_attention)):
    ALL_ATTENTION_FUNCTIONS.register(_name, _function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, _mask)


# -- Flash attention with shared prompts -------------------------------------------------------------------------------
# Attention over a prompt and an answer is the mean of attention over each, weighted by their sums of exponentials. The
# backward pass runs on each of the two with the output and log-sum of the whole, as flash attention needs them.

_ops = torch.library.Library("covey_learner", "DEF")  # opaque to torch.compile, so the layout is not part of its graph
_ops.define("attend(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)")
_ops.define("back(Tensor d, Tensor q, Tensor k, Tensor v, Tensor o, Tensor l, float scale) -> (Tensor, Tensor, Tensor)")
_ops.define(
    "attend_rotary(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, float scale)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
_ops.define(
    "back_rotary(Tensor d, Tensor q, Tensor k, Tensor v, Tensor o, Tensor l, Tensor cos, Tensor sin, float scale)"
    " -> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(_ops, "attend", "CUDA")
def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[T, H, D], [T, K, D] → [T, H, D] and the log-sums of scores [H, T]."""
    from covey.learner.kernels import merge_in_place

    layout = _state.layout
    assert layout is not None and layout.cu_seqlens is not None
    _state.layers += 1
    segments, answers, prompts = layout.cu_seqlens
    longest = layout.longest_segment
    out, lse = _flash(q, k, v, segments, segments, longest, longest, True, scale)
    at = layout.prompt_tokens
    if at < len(q):
        longest_answers = max(map(sum, layout.answers))
        to_prompts = _flash(
            q[at:], k[:at], v[:at], answers, prompts, longest_answers, max(layout.prompts), False, scale
        )
        merge_in_place(out, lse, *to_prompts)
    return out, lse


def _parts_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Gradients of queries, keys and values within the segments, and those between the answers and the prompts: of the
    answers' queries, and of the prompts' keys and values."""
    layout = _state.layout
    assert layout is not None and layout.cu_seqlens is not None, (
        "packed_attention must stay open until the backward pass has finished"
    )
    segments, answers, prompts = layout.cu_seqlens
    longest = layout.longest_segment
    backward = torch.ops.aten._flash_attention_backward
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of dropout, which is 0
    within = backward(grad, q, k, v, out, lse, segments, segments, longest, longest, 0.0, True, seed, seed, scale=scale)
    at = layout.prompt_tokens
    if at == len(q):
        return list(within), None
    longest_answers = max(map(sum, layout.answers))
    parts = (grad[at:], q[at:], k[:at], v[:at], out[at:], lse[:, at:].contiguous())
    between = backward(
        *parts, answers, prompts, longest_answers, max(layout.prompts), 0.0, False, seed, seed, scale=scale
    )
    return list(within), list(between)


@torch.library.impl(_ops, "back", "CUDA")
def _attend_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    (dq, dk, dv), between = _parts_back(grad, q, k, v, out, lse, scale)
    if between is not None:
        at = len(between[1])
        dq[at:] += between[0]
        dk[:at] += between[1]
        dv[:at] += between[2]
    return dq, dk, dv


@torch.library.impl(_ops, "attend_rotary", "CUDA")
def _attend_rotary(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`attend` of queries and keys without their rotary embedding, which is of cos and sin [T, D]. Returns the rotated
    ones too, for the backward pass."""
    from covey.learner.kernels import rotate_heads

    q, k = rotate_heads(q, k, cos, sin)
    return (*_attend(q, k, v, scale), q, k)


@torch.library.impl(_ops, "back_rotary", "CUDA")
def _attend_rotary_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cos: Tensor, sin: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from covey.learner.kernels import rotate_back

    (dq, dk, dv), between = _parts_back(grad, q, k, v, out, lse, scale)
    if between is not None:
        dv[: len(between[2])] += between[2]
    dq, dk = rotate_back(dq, dk, cos, sin, between)
    return dq, dk, dv


@torch.library.register_fake("covey_learner::attend", lib=_ops)
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.register_fake("covey_learner::attend_rotary", lib=_ops)
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return q.new_empty(q.shape), lse, q.new_empty(q.shape), k.new_empty(k.shape)


def _gradients_like(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


for _name in ("back", "back_rotary"):
    torch.library.register_fake(f"covey_learner::{_name}", _gradients_like, lib=_ops)


def _save_attend(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.scale = scale


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return (*torch.ops.covey_learner.back(grad, *ctx.saved_tensors, ctx.scale), None)


def _save_attend_rotary(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, v, cos, sin, scale = inputs
    out, lse, q, k = output
    ctx.save_for_backward(q, k, v, out, lse, cos, sin)
    ctx.scale = scale


def _backward_rotary(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
    return (*torch.ops.covey_learner.back_rotary(grad, *ctx.saved_tensors, ctx.scale), None, None, None)


torch.library.register_autograd("covey_learner::attend", _backward, setup_context=_save_attend, lib=_ops)
torch.library.register_autograd(
    "covey_learner::attend_rotary", _backward_rotary, setup_context=_save_attend_rotary, lib=_ops
)


def rotary_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
    """Attention of queries [T, H, D] and keys [T, K, D] that have no rotary embedding yet, of cos and sin [T, D]."""
    out: Tensor
    if q.is_cuda:
        out, *_ = torch.ops.covey_learner.attend_rotary(q, k, v, cos, sin, scale)
        return out
    q, k = (rotated(x, cos, sin) for x in (q, k))
    window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, _ = sdpa_attention(module, q, k, v, None, scaling=scale, sliding_window=window)
    return out[0]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The halves (a, b) of each head become (a cos₁ − b sin₁, b cos₂ + a sin₂). [T, H, D], cos and sin [T, D]."""
    a, b = x.chunk(2, -1)
    (c1, c2), (s1, s2) = (each[:, None].chunk(2, -1) for each in (cos, sin))
    return torch.cat((a * c1 - b * s1, b * c2 + a * s2), -1)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    forward = torch.ops.aten._flash_attention_forward
    out, lse, *_ = forward(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale)
    return out, lse
