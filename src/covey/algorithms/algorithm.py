"""An algorithm: the parts that make up its three steps. Each part has a file of its own.

    shape       overlong answers, KL in the reward                  Shaping, Kl
    advantages  rewards → advantages, times importance weights      an estimator, Correction
    loss        advantages, log-probs → a loss per token, summed;   a token loss, Aggregation, Kl
                and a KL term

A part that an algorithm does not support is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from covey.algorithms.correction import Correction
from covey.algorithms.distill import Teacher
from covey.algorithms.kl import Kl
from covey.algorithms.ops import policy_sum
from covey.algorithms.shaping import GroupFilter, Shaping
from covey.imports import torch
from covey.protocols import Advantages, Couples, Estimator, LossTerm, Metrics, Needs, TokenLoss, TokenOutputs
from covey.types import Batch, Samples

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Algorithm:
    name: str
    estimator: Estimator
    objective: TokenLoss
    aggregation: Callable[[Tensor, Batch], LossTerm]
    shaping: Shaping = field(default_factory=Shaping)
    filter: GroupFilter = field(default_factory=GroupFilter)
    kl: Kl | None = None
    correction: Correction | None = None
    teacher: Teacher | None = None

    @property
    def parts(self) -> dict[str, Any]:
        return {f.name: part for f in fields(self) if f.name != "name" and (part := getattr(self, f.name)) is not None}

    @property
    def needs(self) -> Needs:
        """The union of what the parts need."""
        declared = [part.needs for part in self.parts.values() if hasattr(part, "needs")]
        return Needs(**{f.name: max(getattr(needs, f.name) for needs in declared) for f in fields(Needs)})

    @property
    def couples(self) -> Couples:
        return self.objective.couples

    @property
    def uses_named_rewards(self) -> bool:
        """True if the estimator reads each reward by itself, not their sum."""
        return getattr(self.estimator, "columns", False)

    def check_rewards(self, weights: Mapping[str, float]) -> None:
        """Raise if the algorithm cannot be trained on rewards with these names and weights."""
        added = self.shaping.added_rewards()
        if clashes := set(weights) & set(added):
            raise ValueError(f"the algorithm adds a reward called {min(clashes)!r}, as is one of yours: rename yours")
        if hasattr(self.estimator, "check"):
            self.estimator.check([*(name for name, weight in weights.items() if weight != 0), *added])

    def shape(self, samples: Samples) -> tuple[Samples, Metrics]:
        samples = self.shaping.reward(samples)
        metrics: Metrics = {}
        if self.kl is not None:
            samples, metrics = self.kl.shape(samples)
        return self.shaping.mask(samples), metrics

    def advantages(self, samples: Samples) -> Advantages:
        advantages = self.estimator.advantages(samples)
        if self.teacher is not None:
            advantages = self.teacher.add_to(advantages, samples)
        sampling_RT = samples.sampling_logprobs_RT
        if self.correction is None or not self.correction.active or sampling_RT is None:
            return advantages
        weight_RT, metrics = self.correction.weights(
            samples.old_logprobs_RT, sampling_RT, samples.mask_RT, samples.episode_R, samples.episodes
        )
        values_RT = advantages.values if advantages.values.dim() == 2 else advantages.values[samples.episode_R][:, None]
        return replace(advantages, values=values_RT * weight_RT, metrics={**advantages.metrics, **metrics})

    def first_pass(self, out: TokenOutputs, batch: Batch) -> Batch:
        """The mini-batch with what the loss of one micro-batch must know of the others."""
        out = replace(out, logprobs=out.logprobs.where(batch.mask_RT, 0))
        if hasattr(self.objective, "first_pass"):
            return self.objective.first_pass(out, batch)
        return replace(batch, policy_sum_N=policy_sum(out, batch))

    def loss(self, out: TokenOutputs, batch: Batch) -> dict[str, LossTerm]:
        # `where` passes no gradient to masked tokens, not even 0 · NaN.
        out = replace(out, logprobs=out.logprobs.where(batch.mask_RT, 0))
        terms = {self.objective.term: self.aggregation(self.objective.loss(out, batch), batch)}
        if self.teacher is not None:
            terms |= self.teacher.loss(out, batch, self.aggregation)
        return terms if self.kl is None else terms | self.kl.loss(out, batch, self.aggregation)

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        with torch.no_grad():
            metrics = self.objective.metrics(out, batch)
            if self.teacher is not None:
                metrics |= self.teacher.metrics(out, batch)
            return metrics if self.kl is None else metrics | self.kl.metrics(out, batch)

    def remarks(self) -> list[str]:
        """Warnings about settings that are valid but rarely intended."""
        return [text for part in self.parts.values() if hasattr(part, "remarks") for text in part.remarks()]

    def state_dict(self) -> dict[str, Any]:
        """The state to checkpoint, by part: learned reward weights, an adaptive KL coefficient."""
        states = {name: part.state_dict() for name, part in self.parts.items() if hasattr(part, "state_dict")}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self.state_dict()
        if set(state) != set(own):
            raise ValueError(f"{self.name} has the state {sorted(own)}, but the checkpoint holds {sorted(state)}")
        for name, values in state.items():
            getattr(self, name).load_state_dict(values)
