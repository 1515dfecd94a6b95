"""GVPO: Group Variance Policy Optimization.

Zhang et al. 2025, https://arxiv.org/abs/2504.19599

With s_i = Σ_t log π_θ(y_i,t) and ρ_i = s_i − s'_i, the log-ratio to the anchor policy π', over a group of k answers

    w_i = (R_i − R̄) − β (ρ_i − ρ̄)                 the weights of a group sum to zero
    L   = −β/(k−1) Σ_i sg(w_i) s_i                  averaged over groups

which has the gradient of ½ Σ_i [(βρ_i − sg(mean βρ)) − (R_i − R̄)]² / (k−1), the sample variance of βρ − R. For any
full-support sampling distribution its unique minimum is π* ∝ π' e^{R/β}: no importance weights, no clipping, and the KL
constraint is part of the weights.

The advantage is R − R̄ alone; the loss subtracts β(ρ − ρ̄), computed from the current log-probs. w carries no gradient
(with a gradient the fixed point would be π'^½ e^{R/2β}); tokens are summed: a mean would change the target.

The anchor is the sampling policy (`reference="old"`, as in the authors' script), so ρ is 0 in the first update of a
batch; the start model ("initial"); or the policy of some steps ago ("moving": after n of them π_n ∝ π_0 e^{nR/β}).
Deviations: none.
Shapes: N episodes, R rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from covey.algorithms.ops import centred, group_mean, group_size, mean_spread, policy_sum
from covey.imports import torch
from covey.protocols import Advantages, Couples, Metrics, Needs, TokenOutputs
from covey.ranges import Interval, Positive, PositiveCap, check_ranges
from covey.types import Batch, Samples

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gvpo:
    term: ClassVar[str] = "gvpo"
    couples: ClassVar[Couples] = "groups"
    on_policy_only: ClassVar[bool] = False
    uses_equal_rewards: ClassVar[bool] = True  # in groups of equal rewards the KL part still acts
    unsupported: ClassVar[Mapping[str, str]] = {
        "kl": "an external KL breaks GVPO's zero sum: the KL is inside its weights (algorithm.beta)",
        "correction": "importance weights would break GVPO's zero sum; it is valid for samples of any policy as it is",
        "aggregation": "gvpo sums over tokens by its theory: a mean changes its optimum",
        "norm": "gvpo sums over tokens by its theory: a mean changes its optimum",
        "teacher": "its loss has no advantage of single tokens: use algorithm=grpo",
        "reject": "rejecting single answers would break GVPO's zero sum",
        "loss": "its loss completes the advantage R − R̄ with β(ρ − ρ̄) of the current policy: they belong together",
    }

    beta: Positive = 0.1  # strength of the KL constraint
    use_bessel_correction: bool = True  # divide by k − 1 (unbiased variance); else by k
    clip_weight: PositiveCap | None = None  # clip w to ±this
    normalize_weights: bool = True  # re-centre w in each group after clipping, so that it still sums to zero
    reference: str = "old"  # the anchor π': old (the sampling policy), initial (the start model), or moving
    reference_every: Interval = 20  # (moving) steps after which the policy becomes the anchor

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")
        if self.reference not in ("old", "initial", "moving"):
            raise ValueError(f"algorithm.reference must be old, initial or moving, got {self.reference!r}")

    @property
    def needs(self) -> Needs:
        every = self.reference_every if self.reference == "moving" else 0
        return Needs(self.reference != "old", every, min_group_size=2, advised_group_size=4)

    def advantages(self, samples: Samples) -> Advantages:
        return Advantages(centred(samples.total_reward(), samples.group_N))

    def loss(self, out: TokenOutputs, batch: Batch) -> Tensor:
        """The loss per token, [R, T]: summed over the tokens of a group and averaged over groups, it is L."""
        weight_N = self._batch_weights(out, batch)
        size_N = group_size(batch.group_N, weight_N.dtype, batch.length_N > 0)
        divisor_N = (size_N - int(self.use_bessel_correction)).clamp(min=1)
        return (-self.beta * weight_N / divisor_N)[batch.episode_R][:, None] * out.logprobs

    def log_ratio(self, out: TokenOutputs, batch: Batch) -> Tensor:
        """ρ of every episode of the mini-batch, detached. Without a first pass the micro-batch holds whole groups;
        episodes of other micro-batches then get ρ = 0, and their groups no loss here."""
        anchor_N = batch.old_sum_N if self.reference == "old" else batch.ref_sum_N
        assert anchor_N is not None, f"GVPO with reference={self.reference} needs reference log-probs"
        ratio_N = policy_sum(out, batch) - anchor_N
        if batch.policy_sum_N is not None:
            return ratio_N
        return ratio_N * torch.zeros_like(anchor_N).index_fill(0, batch.episode_R, 1.0)

    def weights(self, log_ratio_N: Tensor, rewards_N: Tensor, group_N: Tensor, valid_N: Tensor | None = None) -> Tensor:
        """w of each episode; 0 for a group of one and for an empty answer (not in `valid_N`), which does not count in
        its group's means either."""
        rewards_N = rewards_N.to(log_ratio_N.dtype)
        weight_N = rewards_N - group_mean(rewards_N, group_N, valid_N)
        weight_N = weight_N - self.beta * (log_ratio_N - group_mean(log_ratio_N, group_N, valid_N))
        if self.clip_weight is not None:
            weight_N = weight_N.clamp(-self.clip_weight, self.clip_weight)
            if self.normalize_weights:
                weight_N = weight_N - group_mean(weight_N, group_N, valid_N)
        return (weight_N if valid_N is None else weight_N * valid_N).detach()

    def _batch_weights(self, out: TokenOutputs, batch: Batch) -> Tensor:
        return self.weights(self.log_ratio(out, batch), batch.rewards_N, batch.group_N, batch.length_N > 0)

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        """Statistics of the episodes of this micro-batch."""
        here = batch.episode_R.unique()
        weight, rho = self._batch_weights(out, batch)[here], self.log_ratio(out, batch)[here]
        empty_N = batch.length_N == 0
        alone_N = group_size(batch.group_N, valid_N=~empty_N) == 1
        return {  # w is the difference of R and βρ, so their spreads can be compared
            "gvpo/pull": self.beta * mean_spread(rho, batch.group_N[here], ~empty_N[here]),
            "gvpo/reward_spread": mean_spread(batch.rewards_N[here], batch.group_N[here], ~empty_N[here]),
            "gvpo/alone": float((alone_N & ~empty_N)[here].double().mean()),
            "gvpo/empty": float(empty_N[here].double().mean()),
            "gvpo/mean_reward": float(batch.rewards_N[here].mean()),
            "gvpo/mean_weight": float(weight.mean()),
            "gvpo/std_weight": float(weight.std(unbiased=False)),
            "gvpo/max_weight": float(weight.max()),
            "gvpo/min_weight": float(weight.min()),
            "gvpo/mean_log_ratio": float(rho.mean()),
            "gvpo/std_log_ratio": float(rho.std(unbiased=False)),
        }
