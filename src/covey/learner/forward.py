"""The forward pass of a policy: hidden states, then log-probs, entropy and KL of the sampled tokens.

Only positions that predict a sampled token go through the output matrix, in chunks (`logprobs.py`), so memory does not
grow with vocabulary × tokens.

Shapes: M sampled tokens, D hidden size, T tokens of the packed sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from covey.errors import InputError
from covey.learner import attention, logprobs
from covey.learner.packing import Packed
from covey.models.families import (
    LOGIT_TRANSFORMS,
    REFUSED,
    REFUSED_LAYERS,
    TRAINABLE_LAYERS,
    causal_lm,
    fixed_rope_length,
)

# Columns [M, …], and a function of scaled logits and these columns, both of the same tokens, that returns [M].
Divergence = tuple[tuple[Tensor, ...], Callable[..., Tensor]]


def hidden_states(model: Any, packed: Packed) -> Tensor:
    """The last hidden state before each sampled token, [M, D]. With gradient checkpointing, `packed_attention` must
    stay open until the backward pass has finished."""
    lm = causal_lm(model)
    check_layers(lm.config)
    longest = fixed_rope_length(lm.config)
    if longest is not None and packed.layout.longest_row > longest:
        raise InputError(
            f"a row of {packed.layout.longest_row} tokens: {lm.config.model_type} models with these rotary frequencies "
            f"are trained on rows of at most {longest}\n  longer ones have other frequencies: docs/models.md"
        )
    backbone = getattr(lm, "base_model", lm)
    attention.select_attention(lm, packed.layout)
    with attention.packed_attention(packed.layout) as state:
        if packed.images is not None:
            hidden_TD = _hidden_with_images(lm, packed)
        else:
            hidden_TD = backbone(
                input_ids=packed.ids_T[None],
                position_ids=packed.position_T[None],
                # The layout is the mask. Without any, transformers looks for packed sequences, and waits for the GPU.
                attention_mask=packed.ids_T.new_zeros(1, 1, 1, 1, dtype=torch.bool),
                use_cache=False,
            ).last_hidden_state[0]
    if not state.layers:
        raise InputError(
            f"{lm.config.model_type}: this model's code computes attention on its own, without transformers' attention "
            "interface\n  rows of one micro-batch would see each other; use a model that transformers itself implements"
        )
    hidden_MD: Tensor = hidden_TD[packed.source_M]
    return hidden_MD


def _hidden_with_images(lm: Any, packed: Packed) -> Tensor:
    from covey.models.image_features import encode, language_forward

    assert packed.images is not None and packed.pixels is not None
    position = packed.position_T.unsqueeze(-2)  # [1, T], or [3, 1, T]
    return language_forward(lm, packed.ids_T[None], position, packed.images, encode(lm, packed.pixels))[0]


def token_logprobs(
    model: Any,
    hidden_MD: Tensor,
    target_M: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    divergences: Sequence[Divergence] = (),
    rows: int | None = None,
) -> list[Tensor]:
    """Log-prob and entropy of each sampled token under softmax(logits / temperature), and the divergences, [M] each.
    `rows`: tokens whose logits are held at once; None: the usual number."""
    lm = causal_lm(model)
    output = lm.get_output_embeddings()
    if not divergences and is_one_product(lm):
        return list(logprobs.linear_logprobs(hidden_MD, output.weight, target_M, temperature, entropy_gradient, rows))

    def score_chunk(hidden: Tensor, target: Tensor, *others: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits = logprobs.scaled_logits(final_logits(lm, hidden), temperature)
        scores: tuple[Tensor, ...] = logprobs.ChosenLogProb.apply(logits, target, entropy_gradient)
        return *scores, *(f(logits, *columns) for (_, f), columns in zip(divergences, others, strict=True))

    size = rows or logprobs.chunk_rows(len(output.weight))
    chunks: list[tuple[Any, ...]] = [
        (hidden_MD[at], target_M[at], *(tuple(column[at] for column in columns) for columns, _ in divergences))
        for at in (slice(start, start + size) for start in range(0, max(len(target_M), 1), size))
    ]
    recompute = len(chunks) > 1 and torch.is_grad_enabled()
    parts = [
        checkpoint(score_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
        if recompute
        else score_chunk(*chunk)
        for chunk in chunks
    ]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


@torch.no_grad()
def argmax_tokens(model: Any, hidden_MD: Tensor) -> Tensor:
    """The most likely token at each position, [M]."""
    lm = causal_lm(model)
    size = logprobs.chunk_rows(len(lm.get_output_embeddings().weight))
    return torch.cat([final_logits(lm, hidden).argmax(-1) for hidden in hidden_MD.split(size)])


@torch.no_grad()
def score_norms(model: Any, hidden_MD: Tensor, target_M: Tensor, temperature: float) -> Tensor:
    """‖∂ log p_y / ∂ logits‖² = (1 − p_y)² + Σ_{v ≠ y} p_v² of softmax(logits / temperature) at each token, [M]."""
    lm = causal_lm(model)
    size = logprobs.chunk_rows(len(lm.get_output_embeddings().weight))
    parts = []
    for hidden, target in zip(hidden_MD.split(size), target_M.split(size), strict=True):
        probs = logprobs.scaled_logits(final_logits(lm, hidden), temperature).softmax(-1)
        score = probs.scatter_add_(-1, target[:, None], -torch.ones_like(probs[:, :1]))
        parts.append(torch.linalg.vecdot(score, score))
    return torch.cat(parts)


def is_one_product(lm: Any) -> bool:
    """Whether logits are hidden states times the output matrix, and nothing else."""
    output, config = lm.get_output_embeddings(), lm.config.get_text_config(decoder=True)
    transformed = any(getattr(config, name, None) for name in LOGIT_TRANSFORMS)
    return type(output) is torch.nn.Linear and output.bias is None and not transformed


def final_logits(lm: Any, hidden: Tensor) -> Tensor:
    """The output matrix, and the transforms that some families apply after it."""
    logits: Tensor = lm.get_output_embeddings()(hidden)
    config = lm.config.get_text_config(decoder=True)
    for name, transform in LOGIT_TRANSFORMS.items():
        if value := getattr(config, name, None):
            logits = transform(logits, value)
    return logits


def check_layers(model_config: Any) -> set[str]:
    """The attention types of a model's layers, which are refused if they cannot be trained. Empty if it names none."""
    text_config = model_config.get_text_config(decoder=True)
    supported = "  supported: full and sliding-window attention, also with experts: docs/models.md"
    for name in (model_config.model_type, text_config.model_type):
        if reason := REFUSED.get(name):
            raise InputError(f"{name} models cannot be trained yet: {reason}\n{supported}")
    kinds = set(getattr(text_config, "layer_types", None) or [])
    if unsupported := sorted(kinds - TRAINABLE_LAYERS):
        reason = REFUSED_LAYERS.get(unsupported[0], "")
        raise InputError(
            f"models with {', '.join(unsupported)} layers cannot be trained yet ({model_config.model_type})"
            f"{reason and ': '}{reason}\n{supported}"
        )
    if getattr(text_config, "attn_logit_softcapping", None):
        raise InputError(
            f"models with a soft cap on their attention scores cannot be trained yet ({model_config.model_type})\n"
            "  of the Gemma family, use Gemma 1 or 3"
        )
    return kinds
