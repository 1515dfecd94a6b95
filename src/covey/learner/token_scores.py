"""Scoring sampled tokens in one forward pass: log-probs, entropy, critic values, KL to the reference.

Shapes: M sampled tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covey.learner.critic import Critic
from covey.learner.forward import (
    argmax_tokens,
    causal_lm,
    final_logits,
    hidden_states,
    score_norms,
    token_logprobs,
)
from covey.learner.packing import Packed
from covey.learner.parallel import run_unsharded
from covey.models.loading import Reference


@dataclass(frozen=True)
class TokenQuery:
    """The scores to compute for sampled tokens."""

    logprobs: bool = True  # log-probs and entropy
    values: bool = False  # the critic's values
    full_kl: bool = False  # KL to the reference over the whole vocabulary
    is_argmax: bool = False  # whether the sampled token is the most likely one
    score_norms: bool = False  # squared norm of ∂ log π / ∂ logits


class TokenScores(NamedTuple):
    """Per sampled token, [M] each. A tuple, so that FSDP's hooks find the tensors in it."""

    logprobs: Tensor  # zero if not requested
    entropy: Tensor
    values: Tensor | None = None
    full_kl: Tensor | None = None
    is_argmax: Tensor | None = None
    score_norms: Tensor | None = None


def score_tokens(
    model: Any,
    packed: Packed,
    temperature: float,
    query: TokenQuery,
    zeros_M: Tensor,
    critic: Critic | None,
    reference: Reference | None,
    *,
    entropy_gradient: bool,
    logit_rows: int | None = None,
) -> TokenScores:
    """`logit_rows`: tokens whose logits are held at once."""
    logprob_M = entropy_M = zeros_M
    kl_M = value_M = hidden_MD = argmax_M = norm_M = None
    if query.logprobs or (query.values and critic is not None and critic.shared):
        hidden_MD = hidden_states(model, packed)
    if query.logprobs:
        assert hidden_MD is not None
        ref = None
        if query.full_kl:
            assert reference is not None, "the full KL needs a reference policy and none was loaded"
            ref = _reference_hidden(reference, packed), _reference_logits(reference)
        logprob_M, entropy_M, kl_M = token_logprobs(
            model,
            hidden_MD,
            packed.target_M,
            temperature,
            entropy_gradient=entropy_gradient,
            reference=ref,
            rows=logit_rows,
        )
    if query.is_argmax:
        assert hidden_MD is not None
        argmax_M = argmax_tokens(model, hidden_MD) == packed.target_M
    if query.score_norms:
        assert hidden_MD is not None
        norm_M = score_norms(model, hidden_MD, packed.target_M, temperature)
    if query.values:
        assert critic is not None, "the algorithm needs a critic and none was made"
        value_M = critic.values(packed, hidden_MD)
    return TokenScores(logprob_M, entropy_M, value_M, kl_M, argmax_M, norm_M)


@torch.no_grad()
def _reference_hidden(reference: Reference, packed: Packed) -> Tensor:
    with reference.active() as model:
        hidden_MD: Tensor = run_unsharded(model, lambda: hidden_states(model, packed))
        return hidden_MD


def _reference_logits(reference: Reference) -> Any:
    def logits(hidden: Tensor) -> Tensor:
        with reference.active() as model:
            return final_logits(causal_lm(model), hidden)

    return logits
