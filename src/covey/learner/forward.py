"""What a policy says of sampled tokens: log-probs, entropy, KL to a reference.

Only places that predict a sampled token go through the output matrix, in chunks (`logprobs.py`), so memory does not
grow with vocabulary × tokens.

Shapes: M sampled tokens, D hidden size, T tokens of the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from covey.errors import InputError
from covey.learner import attention, logprobs
from covey.learner.packing import Packed

RefLogits = Callable[[Tensor], Tensor]  # hidden states of the reference → its logits


def hidden_states(model: Any, packed: Packed) -> Tensor:
    """What the backbone makes of everything before each sampled token, [M, D]. Where the backward pass computes
    activations again, `attention.reading` must last until it is over."""
    lm = causal_lm(model)
    check_layers(lm.config)
    backbone = getattr(lm, "base_model", lm)
    attention.choose(lm, packed.layout)
    with attention.reading(packed.layout) as line:
        hidden_TD = backbone(
            input_ids=packed.ids_T[None], position_ids=packed.position_T[None], use_cache=False
        ).last_hidden_state[0]
    if not line.asked:
        raise InputError(
            f"{lm.config.model_type}: this model's code computes attention on its own, without transformers' attention "
            "interface\n  rows of one micro-batch would see each other; use a model that transformers itself implements"
        )
    found: Tensor = hidden_TD[packed.source_M]
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
    output = lm.get_output_embeddings()
    if reference is None and _is_one_product(lm):
        chosen, entropy = logprobs.linear_logprobs(hidden_MD, output.weight, target_M, temperature, entropy_gradient)
        return chosen, entropy, None

    def of_chunk(hidden: Tensor, target: Tensor, ref_hidden: Tensor | None) -> tuple[Tensor, ...]:
        logits = logprobs.cooled(final_logits(lm, hidden), temperature)
        found: tuple[Tensor, ...] = logprobs.ChosenLogProb.apply(logits, target, entropy_gradient)
        if reference is None:
            return found
        with torch.no_grad():
            assert ref_hidden is not None
            ref_logits = logprobs.cooled(reference[1](ref_hidden), temperature)
        return (*found, logprobs.FullKl.apply(logits, ref_logits))

    size = max(1, logprobs.CHUNK_LOGITS // output.weight.shape[0])
    targets = target_M.split(size)
    ref_chunks = [None] * len(targets) if reference is None else reference[0].split(size)
    recompute = len(targets) > 1 and torch.is_grad_enabled()
    parts = [
        checkpoint(of_chunk, *chunk, use_reentrant=False) if recompute else of_chunk(*chunk)
        for chunk in zip(hidden_MD.split(size), targets, ref_chunks, strict=True)
    ]
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return columns[0], columns[1], columns[2] if reference is not None else None


@torch.no_grad()
def likeliest(model: Any, hidden_MD: Tensor) -> Tensor:
    """The token that the model would have chosen in each place, [M]."""
    lm = causal_lm(model)
    size = max(1, logprobs.CHUNK_LOGITS // lm.get_output_embeddings().weight.shape[0])
    return torch.cat([final_logits(lm, hidden).argmax(-1) for hidden in hidden_MD.split(size)])


def causal_lm(model: Any) -> Any:
    """The transformers model, also where peft wraps it (its layers then carry the adapters)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _is_one_product(lm: Any) -> bool:
    """Whether logits are hidden states times the output matrix, and nothing else."""
    output, config = lm.get_output_embeddings(), lm.config.get_text_config(decoder=True)
    scaled = any(getattr(config, name, None) for name in ("logits_scaling", "logit_scale", "final_logit_softcapping"))
    return type(output) is torch.nn.Linear and output.bias is None and not scaled


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


# -- Decoder layers compiled by torch, all by the same code: the small operations of a layer become few kernels --------


class CompiledLayers:
    """The layers of a model, compiled for lines of any length when they are first used."""

    def __init__(self, model: Any) -> None:
        self.layers = list(causal_lm(model).base_model.layers)
        self.forwards = [torch.compile(layer.forward, dynamic=True) for layer in self.layers]

    @contextmanager
    def active(self) -> Iterator[None]:
        """While this lasts, the model runs compiled. Others that use it, as the engine, see it as it was."""
        torch._dynamo.config.allow_unspec_int_on_nn_module = True  # the number of a layer is no reason to compile again
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for layer, forward in zip(self.layers, self.forwards, strict=True):
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward
