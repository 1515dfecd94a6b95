"""What a policy says of sampled tokens: log-probs, entropy, KL to a reference, without holding all logits at once.

Only places that predict a sampled token go through the output matrix, in chunks; with gradients and several chunks each
chunk's logits are computed again in the backward pass, so memory does not grow with vocabulary × tokens.

Shapes: M sampled tokens, D hidden size, V vocabulary, L lines of width W.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from covey.errors import InputError
from covey.learner.packing import Packed

CHUNK_LOGITS = 64_000_000  # logits held at once: 256 MB in float32


RefLogits = Callable[[Tensor], Tensor]  # hidden states of the reference → its logits


def hidden_states(model: Any, packed: Packed) -> Tensor:
    """What the backbone makes of everything before each sampled token, [M, D]."""
    lm = causal_lm(model)
    backbone = getattr(lm, "base_model", lm)
    hidden_LWD = backbone(
        input_ids=packed.ids_LW,
        attention_mask=attention_mask(lm.config, packed),
        position_ids=packed.position_LW,
        use_cache=False,
    ).last_hidden_state
    found: Tensor = hidden_LWD.reshape(-1, hidden_LWD.shape[-1])[packed.source_M]
    return found


def token_logprobs(
    model: Any,
    hidden_MD: Tensor,
    target_M: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    reference: tuple[Tensor, RefLogits] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-prob and entropy of each sampled token under softmax(logits / temperature), [M] and [M]; with the hidden
    states and logits of a reference also the KL to it over the whole vocabulary, [M]."""
    lm = causal_lm(model)

    def cooled(logits: Tensor) -> Tensor:
        logits = _at_least_float32(logits)
        return logits if temperature == 1 else logits / temperature

    def of_chunk(hidden: Tensor, target: Tensor, ref_hidden: Tensor | None) -> tuple[Tensor, ...]:
        logits = cooled(final_logits(lm, hidden))
        found: tuple[Tensor, ...] = ChosenLogProb.apply(logits, target, entropy_gradient)
        if reference is None:
            return found
        with torch.no_grad():
            assert ref_hidden is not None
            ref_logits = cooled(reference[1](ref_hidden))
        return (*found, FullKl.apply(logits, ref_logits))

    size = max(1, CHUNK_LOGITS // lm.get_output_embeddings().weight.shape[0])
    targets = target_M.split(size)
    ref_chunks = [None] * len(targets) if reference is None else reference[0].split(size)
    recompute = len(targets) > 1 and torch.is_grad_enabled()
    parts = [
        checkpoint(of_chunk, *chunk, use_reentrant=False) if recompute else of_chunk(*chunk)
        for chunk in zip(hidden_MD.split(size), targets, ref_chunks, strict=True)
    ]
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return columns[0], columns[1], columns[2] if reference is not None else None


class ChosenLogProb(torch.autograd.Function):
    """log p_y and the entropy H of softmax(logits), [M, V] → [M], [M], in as few passes over [M, V] as can be.

        ∂ log p_y / ∂ logit_j = [j = y] − p_j          ∂ H / ∂ logit_j = −p_j (log p_j + H)

    Keeps p instead of the logits; the entropy has a gradient only if asked for.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        lse = logits.logsumexp(-1)
        chosen = logits.gather(-1, target[:, None])[:, 0] - lse
        probs = (logits - lse[:, None]).exp_()
        entropy = lse - torch.linalg.vecdot(probs, logits)
        ctx.save_for_backward(probs, target, entropy)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        to_chosen, to_entropy = gradients
        probs, target, entropy = ctx.saved_tensors
        found = probs * -to_chosen[:, None]
        found.scatter_add_(-1, target[:, None], to_chosen[:, None])
        if ctx.entropy_gradient:
            surprise = torch.special.xlogy(probs, probs) + probs * entropy[:, None]
            found -= surprise * to_entropy[:, None]
        return found, None, None


class FullKl(torch.autograd.Function):
    """KL(softmax(logits) ‖ softmax(ref_logits)) over the vocabulary, [M, V], [M, V] → [M].

    ∂ KL / ∂ logit_j = p_j (log p_j − log q_j − KL)
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ref_logits: Tensor) -> Tensor:
        log_probs = logits.log_softmax(-1)
        apart = log_probs - ref_logits.log_softmax(-1)
        probs = log_probs.exp_()
        kl = torch.linalg.vecdot(probs, apart)
        ctx.save_for_backward(probs, apart, kl)
        return kl

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        probs, apart, kl = ctx.saved_tensors
        return probs * (apart - kl[:, None]) * gradients[0][:, None], None


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def causal_lm(model: Any) -> Any:
    """The transformers model, also where peft wraps it (its layers then carry the adapters)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def final_logits(lm: Any, hidden: Tensor) -> Tensor:
    """The output matrix, with the scalings that some families apply after it."""
    logits = lm.get_output_embeddings()(hidden)
    config = lm.config.get_text_config(decoder=True)
    if getattr(config, "logits_scaling", None):  # Granite
        logits = logits / config.logits_scaling
    if getattr(config, "logit_scale", None):  # Cohere
        logits = logits * config.logit_scale
    if getattr(config, "final_logit_softcapping", None):  # Gemma 2 and 3n
        cap = config.final_logit_softcapping
        logits = torch.tanh(logits / cap) * cap
    return logits


def check_layers(model_config: Any) -> set[str]:
    """The kinds of attention layers of a model, all of them kinds that can be trained; empty where it names none."""
    text_config = model_config.get_text_config(decoder=True)
    kinds = set(getattr(text_config, "layer_types", None) or [])
    if unsupported := kinds - {"full_attention", "sliding_attention"}:
        raise InputError(
            f"models with {', '.join(sorted(unsupported))} layers cannot be trained yet ({model_config.model_type})\n"
            "  supported: full and sliding-window attention (Llama, Qwen, Mistral, Gemma, SmolLM families)"
        )
    if getattr(text_config, "attn_logit_softcapping", None):
        raise InputError(
            f"models with a soft cap on their attention scores cannot be trained yet ({model_config.model_type})\n"
            "  of the Gemma family, use Gemma 1 or 3"
        )
    return kinds


def attention_mask(model_config: Any, packed: Packed) -> Tensor | dict[str, Tensor]:
    """The packed mask as the model wants it: one tensor, or one per kind of layer."""
    kinds = check_layers(model_config)
    window = getattr(model_config.get_text_config(decoder=True), "sliding_window", None)
    if not kinds:
        return packed.allowed(window)
    masks = {"full_attention": packed.allowed()}
    if "sliding_attention" in kinds:
        masks["sliding_attention"] = packed.allowed(window)
    return masks if len(masks) > 1 else masks["full_attention"]
