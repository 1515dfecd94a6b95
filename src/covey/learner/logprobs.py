"""Log-probs and entropies of sampled tokens from hidden states, with hand-written gradients.

    ∂ log p_y / ∂ logit_j = [j = y] − p_j          ∂ H / ∂ logit_j = −p_j (log p_j + H)

Logits are computed in chunks, never all at once. The backward pass recomputes them, turns them into their gradient in
place, and accumulates the gradient of the output matrix in float32.

Shapes: M sampled tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from covey.models.products import block_rows, fast_linear, product, sum_of_products

CHUNK_LOGITS = 64_000_000  # held at once: 256 MB in float32
GPU_CHUNK_LOGITS = 256_000_000  # 512 MB in bfloat16: larger products run faster there


def linear_logprobs(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    target_M: Tensor,
    temperature: float,
    entropy_gradient: bool,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of softmax(hidden · weightᵀ / temperature), [M] and [M]. `rows`: tokens whose
    logits are held at once."""
    gpu = hidden_MD.is_cuda
    rows = rows or chunk_rows(len(weight_VD), gpu=gpu)
    if len(hidden_MD) <= rows and not gpu:  # recomputing logits would save no memory
        logits = scaled_logits(fast_linear(hidden_MD, weight_VD), temperature)
        scores: tuple[Tensor, Tensor] = ChosenLogProb.apply(logits, target_M, entropy_gradient)
    else:
        scores = LinearLogProb.apply(hidden_MD, weight_VD, target_M, temperature, entropy_gradient, rows)
    return scores


def chunk_rows(vocabulary: int, *, gpu: bool = False) -> int:
    """Tokens whose logits are held at once."""
    rows = max(1, (GPU_CHUNK_LOGITS if gpu else CHUNK_LOGITS) // vocabulary)
    return rows if gpu else block_rows(rows)


class LinearLogProb(torch.autograd.Function):
    """`linear_logprobs` in chunks of `rows`. Keeps hidden states and log-sums for the backward pass, no logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, entropy_gradient: bool, rows: int
    ) -> tuple[Tensor, Tensor]:
        parts = [
            _statistics(product(h, weight.t()), t, temperature)
            for h, t in zip(hidden.split(rows), target.split(rows), strict=True)
        ]
        lse, chosen, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, target, lse, entropy)
        ctx.settings = (temperature, entropy_gradient, rows)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, target, lse, entropy = ctx.saved_tensors
        temperature, with_entropy, rows = ctx.settings
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        to_weight = torch.zeros_like(weight, dtype=_sum_dtype(weight)) if needs_weight else None
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            logits = product(hidden[at], weight.t())
            to_entropy = gradients[1][at] if with_entropy else None
            grad = _gradient(logits, target[at], lse[at], entropy[at], gradients[0][at], to_entropy, temperature)
            if to_hidden is not None:
                _product_into(to_hidden[at], grad, weight)
            if to_weight is not None:
                _add_product(to_weight, grad, hidden[at])
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None, None, None


def _statistics(logits: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    if _has_kernels(logits):
        from covey.learner.kernels import row_statistics

        return row_statistics(logits, target, temperature)
    logits = scaled_logits(logits, temperature)
    top = logits.amax(-1)
    below = logits.sub_(top[:, None])
    mass = below.exp()
    total = mass.sum(-1)
    log_total = total.log()
    chosen = below.gather(-1, target[:, None])[:, 0] - log_total
    return top + log_total, chosen, log_total - torch.bmm(mass[:, None], below[:, :, None]).flatten() / total


def _gradient(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    entropy: Tensor,
    to_chosen: Tensor,
    to_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """The gradient with respect to the logits, in their precision."""
    if _has_kernels(logits):
        from covey.learner.kernels import gradient_in_place

        return gradient_in_place(logits, target, lse, entropy, to_chosen, to_entropy, temperature)
    probs = scaled_logits(logits, temperature).sub_(lse[:, None]).exp_()
    to_entropy = None if to_entropy is None else to_entropy / temperature
    return _by_logits(probs, target, entropy, to_chosen / temperature, to_entropy, in_place=True).to(logits.dtype)


def _by_logits(
    probs: Tensor,
    target: Tensor,
    entropy: Tensor,
    to_chosen: Tensor,
    to_entropy: Tensor | None,
    in_place: bool = False,
) -> Tensor:
    surprise = None
    if to_entropy is not None:
        surprise = (torch.special.xlogy(probs, probs) + probs * entropy[:, None]) * to_entropy[:, None]
    gradient = probs.mul_(-to_chosen[:, None]) if in_place else probs * -to_chosen[:, None]
    gradient.scatter_add_(-1, target[:, None], to_chosen[:, None].to(gradient.dtype))
    return gradient if surprise is None else gradient.sub_(surprise)


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64  # the kernels compute in float32


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    if a.is_cuda:
        torch.mm(a, b, out=out)
    else:
        out.copy_(product(a, b))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += aᵀ · b, accumulated in total's precision."""
    if not a.is_cuda:
        total += sum_of_products(a, b)
    elif a.dtype == total.dtype:
        total.addmm_(a.t(), b)
    else:
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)


class ChosenLogProb(torch.autograd.Function):
    """log p_y and the entropy H of softmax(logits), [M, V] → [M], [M], in few passes over [M, V]. Keeps p instead of
    the logits. The entropy has a gradient only with `entropy_gradient`."""

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
        probs, target, entropy = ctx.saved_tensors
        to_entropy = gradients[1] if ctx.entropy_gradient else None
        return _by_logits(probs, target, entropy, gradients[0], to_entropy), None, None


class FullKl(torch.autograd.Function):
    """KL(softmax(logits) ‖ softmax(ref_logits)) over the vocabulary, [M, V], [M, V] → [M].

    ∂ KL / ∂ logit_j = p_j (log p_j − log q_j − KL)
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ref_logits: Tensor) -> Tensor:
        log_probs = logits.log_softmax(-1)
        # A reference may have more outputs, as larger models of a family: tokens of probability 0 under the policy.
        log_ratio = log_probs - ref_logits.log_softmax(-1)[:, : logits.shape[1]]
        probs = log_probs.exp_()
        kl = torch.linalg.vecdot(probs, log_ratio)
        ctx.save_for_backward(probs, log_ratio, kl)
        return kl

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        probs, log_ratio, kl = ctx.saved_tensors
        return probs * (log_ratio - kl[:, None]) * gradients[0][:, None], None


def top_kl(logits: Tensor, ids_MK: Tensor, logprobs_MK: Tensor) -> Tensor:
    """KL(softmax(logits) ‖ q) over the K tokens whose log q is given and the class of all others, [M]. It is at most
    the KL over the vocabulary. Tokens that only q's model has, as larger models of a family, have p = 0."""
    known_MK = ids_MK < logits.shape[1]
    log_p = logits.log_softmax(-1).gather(-1, ids_MK.where(known_MK, 0))
    log_q = logprobs_MK.to(log_p.dtype)
    p = log_p.exp().where(known_MK, 0)
    rest_p, rest_q = (1 - x.sum(-1).clamp(max=1 - 1e-6) for x in (p, log_q.exp()))  # above the rounding of the sums
    return (p * (log_p - log_q)).sum(-1) + rest_p * (rest_p / rest_q).log()


def scaled_logits(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature, in float32 or float64."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1 else logits / temperature
