"""What is said of the sampled tokens of one forward pass: by policy, critic and reference, as far as asked for.

Shapes: M sampled tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.learner.critic import Critic
from covey.learner.forward import RefLogits, causal_lm, final_logits, hidden_states, likeliest, token_logprobs
from covey.learner.packing import Packed
from covey.learner.parallel import inside
from covey.models.loading import Reference


@dataclass(frozen=True)
class Ask:
    """What to find out about sampled tokens."""

    policy: bool = True  # log-probs and entropy
    values: bool = False  # the critic's
    full_kl: bool = False  # to the reference, over the vocabulary
    first_choice: bool = False  # whether no other token is likelier


def say(
    model: Any,
    packed: Packed,
    temperature: float,
    ask: Ask,
    nothing_M: Tensor,
    critic: Critic | None,
    reference: Reference | None,
    *,
    entropy_gradient: bool,
) -> tuple[Tensor | None, ...]:
    """Log-probs, entropies, values, KLs and first choices of the sampled tokens, [M] each. `nothing_M` stands for what
    was not asked and must not be missing."""
    logprob_M = entropy_M = nothing_M
    kl_M = value_M = hidden_MD = first_M = None
    if ask.policy or (ask.values and critic is not None and critic.shared):
        hidden_MD = hidden_states(model, packed)
    if ask.policy:
        assert hidden_MD is not None
        logprob_M, entropy_M, kl_M = token_logprobs(
            model,
            hidden_MD,
            packed.target_M,
            temperature,
            entropy_gradient=entropy_gradient,
            reference=_of_reference(reference, packed) if ask.full_kl else None,
        )
    if ask.first_choice:
        assert hidden_MD is not None
        first_M = likeliest(model, hidden_MD) == packed.target_M
    if ask.values:
        assert critic is not None, "the algorithm needs a critic and none was made"
        value_M = critic.values(packed, hidden_MD)
    return logprob_M, entropy_M, value_M, kl_M, first_M


def _of_reference(reference: Reference | None, packed: Packed) -> tuple[Tensor, RefLogits]:
    """The reference's hidden states, and the way from them to its logits."""
    assert reference is not None, "the full KL needs a reference policy and none was loaded"

    def logits(hidden: Tensor) -> Tensor:
        with reference.active() as model:
            return final_logits(causal_lm(model), hidden)

    with torch.no_grad(), reference.active() as model:
        return inside(model, lambda: hidden_states(model, packed)), logits
