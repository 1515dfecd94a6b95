"""VESPO: Variational Sequence-Level Soft Policy Optimization, a smooth weight of the answer's importance ratio.

Shen et al. 2026, https://arxiv.org/abs/2602.10693

    W_i  = Π_t π_θ(y_i,t) / π_old(y_i,t)                    of the whole answer, not normalised by its length
    φ(W) = W^k e^{λ (1 − W)}                                 φ(1) = 1
    L_t  = −sg( φ(W_i) ) A_t log π_θ(y_i,t)                  k, λ: one pair for A ≥ 0, one for A < 0

φ is the importance weight of least divergence from both policies under a bound on its variance: it falls smoothly on
both sides, by k for answers that became less likely and by λ for those that became more likely. Nothing is clipped.

The paper's π_old is the sampling policy itself, so that W also covers the engine's rounding and stale weights:
With `correction=auto` nothing is recomputed.

Deviations: the loss is averaged over tokens, as in the authors' code; the paper sums over an answer. log W is clamped
to ±20. If advantages differ within an answer each token has its own sign. Shapes: N episodes, R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from covey.algorithms.ops import masked_mean, policy_sum
from covey.imports import torch
from covey.protocols import Couples, Metrics, TokenOutputs
from covey.ranges import Coefficient, check_ranges
from covey.types import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Vespo:
    term: ClassVar[str] = "policy"
    couples: ClassVar[Couples] = "episodes"
    on_policy_only: ClassVar[bool] = False
    weighs_sampler: ClassVar[bool] = True  # its ratio is to the sampling policy: there is nothing left to correct

    k_pos: Coefficient = 2.0  # good answers: exponent of W, which damps those that became less likely
    lambda_pos: Coefficient = 3.0  # good answers: how fast the weight falls where they became more likely
    k_neg: Coefficient = 3.0  # bad answers: exponent of W
    lambda_neg: Coefficient = 2.0  # bad answers: how fast the weight falls

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")

    def loss(self, out: TokenOutputs, batch: Batch) -> Tensor:
        return -self.weight(out, batch) * batch.advantages_RT * out.logprobs

    def weight(self, out: TokenOutputs, batch: Batch) -> Tensor:
        """φ(W) of each token's answer, [R, T], without gradient."""
        log_weight_N = (policy_sum(out, batch) - batch.old_sum_N).clamp(-20, 20)
        log_w = log_weight_N[batch.episode_R][:, None]
        good = batch.advantages_RT >= 0
        k_pos, k_neg, lambda_pos, lambda_neg = log_w.new_tensor(
            [self.k_pos, self.k_neg, self.lambda_pos, self.lambda_neg]
        )
        k, decay = torch.where(good, k_pos, k_neg), torch.where(good, lambda_pos, lambda_neg)
        return torch.exp(k * log_w + decay * (1 - log_w.exp()))

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        """The mean weight of a token: 1 on-policy."""
        return {"policy/weight": masked_mean(self.weight(out, batch), batch.mask_RT)}
