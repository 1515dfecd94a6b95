"""MaxRL: maximum-likelihood reinforcement learning, the group mean as baseline and as scale.

Tajwar et al. 2026, https://arxiv.org/abs/2602.02710

    A_i = (R_i − R̄) / R̄                     over the group; for rewards of 0 and 1

Where a question is solved with probability p, reinforcement learning climbs p, whose gradient vanishes on hard ones;
maximum likelihood climbs log p, whose gradient is ∇p/p. The expected gradient of k answers is that of

    −Σ_{j=1..k−1} (1 − p)^j / j                the series of log p, cut short

so groups of two give REINFORCE, and larger ones come closer to maximum likelihood.

Deviations: a group whose mean is not above 0 has advantage 0 (the authors' code divides by R̄ + 1e-6), as has a group of
one. Shapes: N episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from covey.algorithms.ops import centred, group_mean, group_sum
from covey.imports import torch
from covey.protocols import Advantages, Needs
from covey.types import Samples


@dataclass(frozen=True, slots=True)
class Maxrl:
    needs: ClassVar[Needs] = Needs(min_group_size=2)
    unsupported: ClassVar[Mapping[str, str]] = {
        "kl_in=reward": "divides by the mean reward, which a KL in the reward may bring close to 0",
    }

    def advantages(self, samples: Samples) -> Advantages:
        rewards_N, group_N = samples.total_reward(), samples.group_N
        mean_N = group_mean(rewards_N, group_N)
        scaled_N = centred(rewards_N, group_N) / torch.where(mean_N > 0, mean_N, torch.ones_like(mean_N))
        negative_N = group_sum((rewards_N < 0).to(rewards_N.dtype), group_N) > 0
        metrics = {"maxrl/negative": float(negative_N.double().mean()) if len(negative_N) else 0.0}
        return Advantages(torch.where(mean_N > 0, scaled_N, torch.zeros_like(scaled_N)), metrics=metrics)
