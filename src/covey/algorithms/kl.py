"""KL to the reference policy, in the loss or in the reward, and KL to the sampling policy.

Estimators of KL(π ‖ π_ref) from samples of π (Schulman 2020, "Approximating KL divergence"), d = log π_ref − log π:

    k1 (kl) = −d    abs = |d|    k2 (mse) = d²/2    k3 (low_var_kl) = e^d − 1 − d    full = Σ_v π(v) log π(v)/π_ref(v)

    in the loss     L + kl_coef · aggregate(KL_t)
    kl_unbiased     L + kl_coef · aggregate(π/π_old · KL_t), whose gradient is that of KL(π ‖ π_ref) for k1 and k3
                    DeepSeek-AI 2025, https://arxiv.org/abs/2512.02556
    in the reward   r_t − kl_coef · KL_t         on sampled tokens, before advantages
    adaptive        kl_coef ← kl_coef · (1 + clip(KL/kl_target − 1, ±0.2) · n/kl_horizon)      n episodes a step
                    Ziegler et al. 2019, https://arxiv.org/abs/1909.08593; n/kl_horizon counts as 1 at most

KL to the sampling policy is KL(π_old ‖ π), since the samples are π_old's, so k3 has d = log π − log π_old there.

Deviations: beyond d = 20 k3 continues as a straight line, because e^d would overflow sums.
Shapes: N episodes, R rows, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from covey.algorithms.ops import episode_sum, masked_mean, probability_ratio
from covey.imports import torch
from covey.protocols import LossTerm, Metrics, Needs, TokenOutputs
from covey.ranges import Coefficient, Positive, PositiveCap, Steps, check_ranges
from covey.types import Batch, Samples

if TYPE_CHECKING:
    from torch import Tensor

KL_NAMES = {"k1": "k1", "kl": "k1", "abs": "abs", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}
Aggregate = Callable[["Tensor", Batch], LossTerm]


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, name: str) -> Tensor:
    """KL per token, from the log-probs of the sampled tokens. The full KL needs the whole vocabulary: see `Kl`."""
    if name not in KL_NAMES:
        raise ValueError(f"unknown KL estimator {name!r}; known: {', '.join(KL_NAMES)}")
    d = ref_logprobs - logprobs
    match KL_NAMES[name]:
        case "k1":
            return -d
        case "abs":
            return d.abs()
        case "k2":
            return d**2 / 2
        case _:
            near = d.clamp(max=20)
            slope = torch.expm1(near)
            return slope - near + (d - near) * slope.detach()


@dataclass(slots=True)
class Kl:
    kl_coef: Coefficient = 0.0  # weight of the KL to the reference; 0: none, and no reference model is kept
    kl_in: str = "loss"  # loss | reward: what it is added to
    kl_estimator: str = "auto"  # k1 (kl) | abs | k2 (mse) | k3 (low_var_kl) | full; auto: k3 in the loss, else k1
    kl_unbiased: bool = False  # in the loss, times π/π_old: its gradient is then that of the KL itself
    kl_target: Positive | None = None  # steer kl_coef so that the KL per token stays near this; null: fixed
    kl_horizon: PositiveCap = 10_000.0  # episodes over which kl_coef is steered
    kl_old_coef: Coefficient = 0.0  # weight of the KL to the sampling policy in the loss
    reference_every: Steps = 0  # steps after which the policy becomes the reference; 0: the start model stays it

    coef: float = field(init=False)  # the current, adapted kl_coef

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")
        self.coef = self.kl_coef
        if self.kl_estimator == "auto":
            self.kl_estimator = "k3" if self.kl_in == "loss" else "k1"
        if self.kl_estimator not in (*KL_NAMES, "full"):
            known = ", ".join((*KL_NAMES, "full"))
            raise ValueError(f"algorithm.kl_estimator must be one of {known}, got {self.kl_estimator!r}")
        if self.kl_in not in ("loss", "reward"):
            raise ValueError(f"algorithm.kl_in must be loss or reward, got {self.kl_in!r}")
        if self.kl_unbiased and (self.kl_in == "reward" or self.kl_estimator == "full"):
            raise ValueError("algorithm.kl_unbiased is for a KL of sampled tokens in the loss: kl_in=loss, not full")
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("algorithm.kl_target steers kl_coef: both must be positive")
        if self.reference_every and self.kl_coef == 0:
            raise ValueError("algorithm.reference_every moves the reference of the KL: set algorithm.kl_coef above 0")

    @property
    def needs(self) -> Needs:
        on, full = self.kl_coef != 0, self.kl_estimator == "full"
        sampled = self.kl_in == "reward" or self.kl_target is not None
        return Needs(
            reference=on,
            reference_every=self.reference_every if on else 0,
            full_kl=on and full and self.kl_in == "loss",
            sample_full_kl=on and full and sampled,
        )

    def remarks(self) -> list[str]:
        if self.kl_coef and self.kl_in == "loss" and KL_NAMES.get(self.kl_estimator) == "k1" and not self.kl_unbiased:
            return ["kl_estimator=k1 in the loss has a gradient of mean zero on-policy: use k2 or k3, or kl_in=reward"]
        return []

    def shape(self, samples: Samples) -> tuple[Samples, Metrics]:
        """Measure the KL of the step's samples; with kl_in=reward subtract it from the reward; adapt kl_coef."""
        if not self.kl_coef or not (self.kl_in == "reward" or self.kl_target):
            return samples, {}
        if self.kl_estimator == "full":
            kl_RT = samples.full_kl_RT
        else:
            assert samples.ref_logprobs_RT is not None, "a KL needs reference log-probs"
            kl_RT = kl_penalty(samples.old_logprobs_RT, samples.ref_logprobs_RT, self.kl_estimator)
        assert kl_RT is not None, "the full KL needs the whole vocabulary"
        length_N = samples.lengths()
        sum_N = episode_sum(kl_RT, samples.mask_RT, samples.episode_R, samples.episodes)
        measured = float((sum_N / length_N.clamp(min=1))[length_N > 0].mean()) if bool((length_N > 0).any()) else 0.0
        metrics = {"kl/samples": measured}
        if self.kl_in == "reward":
            before = samples.token_rewards_RT
            penalty_RT = self.coef * kl_RT.where(samples.mask_RT, 0)
            samples = replace(samples, token_rewards_RT=-penalty_RT if before is None else before - penalty_RT)
            metrics |= {"kl/reward": -self.coef * float(sum_N.mean()), "kl/coef": self.coef}
        if self.kl_target is not None and math.isfinite(measured):  # a non-finite KL must not break the controller
            error = min(max(measured / self.kl_target - 1, -0.2), 0.2)
            self.coef *= 1 + error * min(samples.episodes / self.kl_horizon, 1.0)
        return samples, {"kl/coef": self.coef} | metrics

    def loss(self, out: TokenOutputs, batch: Batch, aggregate: Aggregate) -> dict[str, LossTerm]:
        terms = {}
        if self.kl_coef and self.kl_in == "loss":
            assert self.kl_estimator != "full" or out.full_kl is not None, "the full KL needs the whole vocabulary"
            kl_RT = self.to_reference(out, batch)
            if self.kl_unbiased:
                kl_RT = kl_RT * probability_ratio(out.logprobs, batch.old_logprobs_RT)
            terms["kl"] = aggregate(self.coef * kl_RT, batch)
        if self.kl_old_coef:
            terms["kl_old"] = aggregate(self.kl_old_coef * kl_penalty(batch.old_logprobs_RT, out.logprobs, "k3"), batch)
        return terms

    def to_reference(self, out: TokenOutputs, batch: Batch) -> Tensor:
        if self.kl_estimator == "full" and out.full_kl is not None:
            return out.full_kl
        assert batch.ref_logprobs_RT is not None, "a KL needs reference log-probs"
        return kl_penalty(out.logprobs, batch.ref_logprobs_RT, KL_NAMES.get(self.kl_estimator, "k3"))

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        if batch.ref_logprobs_RT is None:
            return {}
        return {"kl/reference": masked_mean(self.to_reference(out, batch), batch.mask_RT)}

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef} if self.kl_target is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coef = float(state["coef"])
