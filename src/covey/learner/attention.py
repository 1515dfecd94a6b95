"""Attention of packed rows, put into a transformers model through its attention interface.

    prompt 1   prompt 2  │ answer 1.1   answer 1.2   answer 2.1

A token sees its own segment up to itself; a token of an answer sees all of its prompt as well. `reading(layout)` says
which line of tokens the model is being fed; it must last until the backward pass is over. Outside of it the model
attends as transformers' own `sdpa` does.

    plain   any device, any precision, sliding windows: scaled dot products piece by piece
    fast    bfloat16 or float16 on a GPU: flash attention over segments, and over prompts, joined by their log-sums

Shapes: T tokens of the line, H query heads, K key heads, D head size.
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

PLAIN, FAST = "covey_packed", "covey_packed_fast"
PIECE = 128  # tokens of answers that plain attention takes at once


@dataclass(frozen=True)
class Piece:
    """Consecutive segments of the line, and the prompt they continue (None for a prompt itself)."""

    segments: tuple[int, ...]
    prompt: int | None = None

    @property
    def length(self) -> int:
        return sum(self.segments)


@dataclass(frozen=True)
class Layout:
    """Lengths of prompts and of the answers to each, in the order of the line."""

    prompts: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    ends: tuple[Tensor, Tensor, Tensor] | None = None  # of segments, of each prompt's answers, of prompts; from 0
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, prompts: Sequence[int], answers: Sequence[Sequence[int]]) -> Layout:
        return cls(tuple(prompts), tuple(map(tuple, answers)))

    def to(self, device: torch.device, non_blocking: bool = False) -> Layout:
        """With what flash attention wants to know, on its device."""
        if device.type != "cuda":
            return self
        segments = [n for n in (*self.prompts, *(n for group in self.answers for n in group)) if n]
        lengths = (segments, [sum(group) for group in self.answers], self.prompts)
        ends = [torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in lengths]
        first, second, third = (end.to(device, non_blocking=non_blocking) for end in ends)
        return Layout(self.prompts, self.answers, (first, second, third))

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
    def pieces(self) -> list[Piece]:
        """What plain attention takes at once: each prompt, then answers to one prompt, not too many of them."""
        found = [Piece((length,)) for length in self.prompts]
        for number, group in enumerate(self.answers):
            now: list[int] = []
            for length in group:
                if now and sum(now) + length > PIECE:
                    found.append(Piece(tuple(now), number))
                    now = []
                now.append(length)
            found.append(Piece(tuple(now), number))
        return [piece for piece in found if piece.length]

    def mask(self, number: int, piece: Piece, window: int | None, device: torch.device) -> Tensor:
        """Which tokens of its prompt and of itself each token of a piece sees, [queries, keys]. Made once."""
        key = (number, window)
        if key not in self.masks:
            before = 0 if piece.prompt is None else self.prompts[piece.prompt]
            segment = torch.repeat_interleave(torch.tensor(piece.segments))
            position = torch.cat([torch.arange(before, before + n) for n in piece.segments])
            keys = torch.cat([torch.arange(before), position])
            same = torch.cat([torch.ones(len(segment), before, dtype=torch.bool), segment[:, None] == segment], 1)
            seen = same & (keys <= position[:, None])
            if window is not None:
                seen &= keys > position[:, None] - window
            self.masks[key] = seen.to(device)
        return self.masks[key]


@dataclass
class Line:
    """What is being read, and how often a layer asked for it. One at a time: the learner has one model at work."""

    layout: Layout | None = None
    asked: int = 0


_now = Line()


@contextmanager
def reading(layout: Layout) -> Iterator[Line]:
    before = _now.layout
    _now.layout, _now.asked = layout, 0
    try:
        yield _now
    finally:
        _now.layout = before


def choose(lm: Any, layout: Layout) -> bool:
    """Sets the model's attention for this line; True if it is the fast one."""
    config = lm.config.get_text_config(decoder=True)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    fits = window is None or layout.longest_row <= window
    half = lm.get_input_embeddings().weight.dtype in (torch.bfloat16, torch.float16)
    fast = layout.ends is not None and half and dim % 8 == 0 and dim <= 256 and fits
    config._attn_implementation = FAST if fast else PLAIN
    return fast


def plain(
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
    layout = _now.layout
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)
    _now.asked += 1
    pieces = layout.pieces
    sizes = [piece.length for piece in pieces]
    queries, keys, values = (x.split(sizes, 2) for x in (query, key, value))
    found = []
    for number, piece in enumerate(pieces):
        k, v, q = keys[number], values[number], queries[number]
        if piece.prompt is not None:
            k, v = torch.cat((keys[piece.prompt], k), 2), torch.cat((values[piece.prompt], v), 2)
        causal = piece.prompt is None and sliding_window is None
        mask = None if causal else layout.mask(number, piece, sliding_window, q.device)
        found.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
        )
    return torch.cat(found, 2).transpose(1, 2), None


def fast(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out, _lse = torch.ops.covey_learner.attend(*(x[0].transpose(0, 1) for x in (query, key, value)), scale)
    return out[None], None


def _mask(**arguments: Any) -> Tensor | None:
    """No mask for a line that is being read: the attention knows it."""
    found: Tensor | None = None if _now.layout is not None else sdpa_mask(**arguments)
    return found


for _name, _function in ((PLAIN, plain), (FAST, fast)):
    ALL_ATTENTION_FUNCTIONS.register(_name, _function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, _mask)


# -- flash attention, prompts shared --------------------------------------------------------------------------------
#
# A softmax over a prompt and an answer is the mean of a softmax over each, weighted by their sums of exponentials. The
# backward pass of flash attention needs the output and log-sum of the whole, so it is run on each part with those.


_ops = torch.library.Library("covey_learner", "DEF")  # opaque to torch.compile: the layout is no part of its graph
_ops.define("attend(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)")
_ops.define("back(Tensor d, Tensor q, Tensor k, Tensor v, Tensor o, Tensor l, float scale) -> (Tensor, Tensor, Tensor)")


@torch.library.impl(_ops, "attend", "CUDA")
def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[T, H, D], [T, K, D] → [T, H, D] and the log-sums of scores [H, T]."""
    layout = _now.layout
    assert layout is not None and layout.ends is not None
    _now.asked += 1
    segments, answers, prompts = layout.ends
    longest = layout.longest_segment
    out, lse = _flash(q, k, v, segments, segments, longest, longest, True, scale)
    at = layout.prompt_tokens
    if at < len(q):
        most = max(map(sum, layout.answers))
        other, other_lse = _flash(q[at:], k[:at], v[:at], answers, prompts, most, max(layout.prompts), False, scale)
        share = torch.sigmoid(other_lse - lse[:, at:])
        lse[:, at:] -= torch.nn.functional.logsigmoid(lse[:, at:] - other_lse)
        out[at:] = torch.lerp(out[at:].float(), other.float(), share.t()[:, :, None]).to(out.dtype)
    return out, lse


@torch.library.register_fake("covey_learner::attend", lib=_ops)
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.impl(_ops, "back", "CUDA")
def _attend_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    layout = _now.layout
    assert layout is not None and layout.ends is not None, "the line must be read until the backward pass is over"
    segments, answers, prompts = layout.ends
    longest = layout.longest_segment
    dq, dk, dv = _flash_backward(grad, q, k, v, out, lse, segments, segments, longest, longest, True, scale)
    at = layout.prompt_tokens
    if at < len(q):
        most = max(map(sum, layout.answers))
        parts = (grad[at:], q[at:], k[:at], v[:at], out[at:], lse[:, at:].contiguous())
        more = _flash_backward(*parts, answers, prompts, most, max(layout.prompts), False, scale)
        dq[at:] += more[0]
        dk[:at] += more[1]
        dv[:at] += more[2]
    return dq, dk, dv


@torch.library.register_fake("covey_learner::back", lib=_ops)
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.scale = scale


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return (*torch.ops.covey_learner.back(grad, *ctx.saved_tensors, ctx.scale), None)


torch.library.register_autograd("covey_learner::attend", _backward, setup_context=_keep, lib=_ops)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    most_q: int,
    most_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, ends_q, ends_k, most_q, most_k, 0.0, causal, False, scale=scale
    )
    return out, lse


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    most_q: int,
    most_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # random state of a dropout that there is none of
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, ends_q, ends_k, most_q, most_k, 0.0, causal, unused, unused, scale=scale
    )
    return found
