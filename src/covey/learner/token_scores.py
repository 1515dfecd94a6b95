"""Scoring sampled tokens in one forward pass: log-probs, entropy, critic values, KL to the reference and to a teacher.

Shapes: M sampled tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covey.learner.critic import Critic
from covey.learner.forward import (
    Divergence,
    argmax_tokens,
    causal_lm,
    final_logits,
    hidden_states,
    score_norms,
    token_logprobs,
)
from covey.learner.logprobs import FullKl, scaled_logits, top_kl
from covey.learner.packing import Packed
from covey.learner.parallel import run_unsharded
from covey.learner.routing import RoutingReplay, suspending
from covey.models.loading import Reference
from covey.types import TeacherTop


@dataclass(frozen=True)
class TokenQuery:
    """The scores to compute for sampled tokens."""

    logprobs: bool = True  # log-probs and entropy
    values: bool = False  # the critic's values
    full_kl: bool = False  # KL to the reference over the whole vocabulary
    is_argmax: bool = False  # whether the sampled token is the most likely one
    score_norms: bool = False  # squared norm of ∂ log π / ∂ logits
    teacher_kl: bool = False  # KL to the teacher over the whole vocabulary, or over the tokens of `TeacherInput.top`


class TokenScores(NamedTuple):
    """Per sampled token, [M] each. A tuple, so that FSDP's hooks find the tensors in it."""

    logprobs: Tensor  # zero if not requested
    entropy: Tensor
    values: Tensor | None = None
    full_kl: Tensor | None = None
    is_argmax: Tensor | None = None
    score_norms: Tensor | None = None
    teacher_kl: Tensor | None = None


@dataclass(frozen=True)
class TeacherInput:
    """How the teacher is compared with the policy: in a packed sequence of its own, or by its most likely tokens."""

    model: Reference | None = None  # None: the policy itself
    packed: Packed | None = None  # with the teacher's prompts
    top: TeacherTop | None = None  # [M, K]


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
    teacher: TeacherInput | None = None,
    routing: RoutingReplay | None = None,
) -> TokenScores:
    """`logit_rows`: tokens whose logits are held at once. `routing` is of the policy: suspended for other models."""
    logprob_M = entropy_M = zeros_M
    kl_M = value_M = hidden_MD = argmax_M = norm_M = teacher_M = None
    if query.logprobs or (query.values and critic is not None and critic.shared):
        hidden_MD = hidden_states(model, packed)
    if query.logprobs:
        assert hidden_MD is not None
        divergences: list[Divergence] = []
        if query.full_kl:
            assert reference is not None, "the full KL needs a reference policy and none was loaded"
            divergences.append(_full_kl(reference.active, packed, temperature, routing))
        if query.teacher_kl:
            assert teacher is not None, "the KL to the teacher needs a teacher"
            divergences.append(_teacher_kl(teacher, model, temperature, routing))
        logprob_M, entropy_M, *kls = token_logprobs(
            model,
            hidden_MD,
            packed.target_M,
            temperature,
            entropy_gradient=entropy_gradient,
            rows=logit_rows,
            divergences=divergences,
        )
        kl_M = kls.pop(0) if query.full_kl else None
        teacher_M = kls.pop(0) if query.teacher_kl else None
    if query.is_argmax:
        assert hidden_MD is not None
        argmax_M = argmax_tokens(model, hidden_MD) == packed.target_M
    if query.score_norms:
        assert hidden_MD is not None
        norm_M = score_norms(model, hidden_MD, packed.target_M, temperature)
    if query.values:
        assert critic is not None, "the algorithm needs a critic and none was made"
        value_M = critic.values(packed, hidden_MD)
    return TokenScores(logprob_M, entropy_M, value_M, kl_M, argmax_M, norm_M, teacher_M)


def _teacher_kl(teacher: TeacherInput, policy: Any, temperature: float, routing: RoutingReplay | None) -> Divergence:
    if teacher.top is not None:
        return (teacher.top.ids, teacher.top.logprobs), top_kl
    assert teacher.packed is not None
    active = partial(nullcontext, policy) if teacher.model is None else teacher.model.active
    return _full_kl(active, teacher.packed, temperature, routing)


def _full_kl(
    active: Callable[[], AbstractContextManager[Any]],
    packed: Packed,
    temperature: float,
    routing: RoutingReplay | None,
) -> Divergence:
    """KL over the whole vocabulary to the model that `active` gives, on its packed sequence."""
    with torch.no_grad(), suspending(routing), active() as other:
        config = causal_lm(other).config.get_text_config(decoder=True)
        attention = config._attn_implementation  # if this is the policy, its backward pass needs the one it had
        hidden_MD: Tensor = run_unsharded(other, lambda: hidden_states(other, packed))
        config._attn_implementation = attention

    def divergence(logits: Tensor, hidden: Tensor) -> Tensor:
        with torch.no_grad(), active() as other:
            other_logits = scaled_logits(final_logits(causal_lm(other), hidden), temperature)
        kl: Tensor = FullKl.apply(logits, other_logits)
        return kl

    return (hidden_MD,), divergence
