"""DGDO: GDPO whose reward weights follow how unstable each reward is.

Per reward n, on the raw rewards of all groups that were sampled:

    μ = mean of group means        σ² = mean within-group variance + variance of group means + 1e-8   (population)
    D = σ / (|μ| + ε)              the instability; 0 if the reward does not vary; at most max_instability
    target ∝ softmax(D) · priors   (softmax(−D) with `invert`)
    w ← β_eff w + (1 − β_eff) target                        from uniform; β_eff rises from beta_start to beta
    used: the nearest point to w on the simplex with w_n ≥ min_weight

and then GDPO with the weights K·w_n · reward.weights. During the first `warmup_steps` w is uniform and constant, which
is exactly GDPO.

Deviations from the original, which `paper_exact=true` restores: D is capped, and a reward that never varies has D = 0
instead of gaining weight. The floor holds exactly (clamping and renormalising would violate it).
State: w and the step number; it is part of a checkpoint. Shapes: N episodes, K rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from covey.algorithms.gdpo import combined, reward_metrics, trained
from covey.algorithms.ops import mean_and_variance, simplex_with_floor
from covey.imports import torch
from covey.protocols import Advantages, Metrics, Needs
from covey.ranges import Cap, Coefficient, Epsilon, Share, Steps, check_ranges
from covey.types import Samples

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST = 1e-12  # lower bound of the divisor of D, also with epsilon=0


@dataclass(slots=True)
class Dgdo:
    needs: ClassVar[Needs] = Needs(min_group_size=2)
    columns: ClassVar[bool] = True

    beta: Share = 0.9  # share of the old weights kept each step
    epsilon: Epsilon = 1e-6  # added to standard deviations and to |μ|
    warmup_steps: Steps = 30  # steps with uniform weights
    beta_start: Share = 0.5  # β right after the warm-up
    beta_warmup_steps: Steps = 200  # steps over which β rises to its final value
    min_weight: Share = 0.15  # no reward's weight falls below this
    invert: bool = False  # give weight to stable rewards instead
    importance_priors: dict[str, Coefficient] | None = None  # by reward name: multiplies the target; default 1
    max_instability: Cap = 10.0  # cap on D
    paper_exact: bool = False  # no cap, and constant rewards count as unstable

    step: int = field(default=0, init=False)
    weights: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")

    def advantages(self, samples: Samples) -> Advantages:
        names = trained(samples)
        self.check(names)
        self.weights = self.weights or dict.fromkeys(names, 1 / len(names))
        warm = self.step < self.warmup_steps
        statistics = {name: self.instability(*samples.unfiltered_reward(name)) for name in names}
        if not warm:
            self._update_weights({name: values["instability"] for name, values in statistics.items()})
        used = dict(zip(names, simplex_with_floor([self.weights[n] for n in names], self.min_weight), strict=True))
        scaled = {name: samples.weights[name] * (1.0 if warm else used[name] * len(names)) for name in names}
        metrics = reward_metrics(samples) | self._metrics(statistics, used, warm)
        self.step += 1
        return Advantages(combined(samples, scaled, self.epsilon), metrics=metrics)

    def instability(self, reward_N: Tensor, group_N: Tensor) -> Metrics:
        """μ, σ and D of one reward, over the episodes that have it."""
        scored_N = ~reward_N.isnan()
        reward_N, group_N = reward_N[scored_N].double(), group_N[scored_N].unique(return_inverse=True)[1]
        if not len(reward_N):
            return {"mu": 0.0, "sigma": 0.0, "instability": 0.0}
        mu, variance = mean_and_variance(reward_N, group_N)
        sigma = math.sqrt(variance + 1e-8)
        unstable = sigma / max(abs(mu) + self.epsilon, SMALLEST)
        if not self.paper_exact:
            constant = math.sqrt(variance) <= 1e-8 * float(reward_N.abs().max())
            unstable = 0.0 if constant else min(unstable, self.max_instability)
        return {"mu": mu, "sigma": sigma, "instability": unstable}

    def effective_beta(self) -> float:
        done = (self.step - self.warmup_steps) / self.beta_warmup_steps if self.beta_warmup_steps else 1.0
        return self.beta_start + (self.beta - self.beta_start) * min(max(done, 0.0), 1.0)

    def _update_weights(self, instability: Mapping[str, float]) -> None:
        sign, keep, priors = -1 if self.invert else 1, self.effective_beta(), self.importance_priors or {}
        unstable = torch.tensor([sign * d for d in instability.values()], dtype=torch.float64)
        prior = torch.tensor([priors.get(name, 1.0) for name in instability], dtype=torch.float64)
        target = torch.softmax(unstable + prior.log(), 0).tolist()  # as a product it might round to 0 everywhere
        self.weights = {n: keep * self.weights[n] + (1 - keep) * t for n, t in zip(instability, target, strict=True)}

    def check(self, names: list[str]) -> None:
        """Raise if these rewards cannot be weighted."""
        if not names or len(names) * self.min_weight > 1 + 1e-12:
            raise ValueError(f"algorithm.min_weight={self.min_weight} leaves no room for {len(names)} rewards")
        priors = self.importance_priors or {}
        if strange := set(priors) - set(names):
            raise ValueError(f"algorithm.importance_priors names {sorted(strange)}; the rewards are {names}")
        if not any(priors.get(name, 1.0) for name in names):
            raise ValueError("algorithm.importance_priors must not be all zero")
        if self.weights and set(self.weights) != set(names):
            raise ValueError(f"DGDO's weights are for {sorted(self.weights)}, and the rewards are {sorted(names)}")

    def _metrics(self, statistics: Mapping[str, Metrics], used: Mapping[str, float], warm: bool) -> Metrics:
        metrics = {f"dgdo/{name}/{key}": value for name, values in statistics.items() for key, value in values.items()}
        metrics |= {f"dgdo/{name}/weight": weight for name, weight in used.items()}
        entropy = -sum(w * math.log(w) for w in used.values() if w > 0)
        general = {"effective_beta": self.effective_beta(), "in_warmup": float(warm), "weight_entropy": entropy}
        return metrics | {f"dgdo/{key}": value for key, value in general.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "weights": dict(self.weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.weights = int(state["step"]), {k: float(v) for k, v in state["weights"].items()}
