"""The algorithms, by name. One algorithm, one file; this page is the list.

An algorithm is an estimator (rewards → advantages) and an objective (advantages, log-probs → loss). Where one class
is both, the loss completes the advantage (GVPO). The settings of an algorithm are the fields of its parts.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from covey.algorithms.grpo import Grpo
from covey.algorithms.gvpo import Gvpo
from covey.algorithms.ppo_clip import PpoClip
from covey.errors import unknown
from covey.protocols import Advantages, Estimator, LossTerm, Metrics, Needs, Objective, TokenOutputs
from covey.types import Batch, Samples


@dataclass(frozen=True)
class Parts:
    estimator: type
    objective: type
    summary: str


ALGORITHMS: dict[str, Parts] = {
    "gvpo": Parts(Gvpo, Gvpo, "group variance: centred rewards, KL inside the weights, no clipping"),
    "grpo": Parts(Grpo, PpoClip, "group-normalised rewards with PPO's clipped loss"),
}


@dataclass(frozen=True)
class Algorithm:
    """An estimator and an objective under one name."""

    name: str
    estimator: Estimator
    objective: Objective

    @property
    def needs(self) -> Needs:
        ours = [part.needs for part in (self.estimator, self.objective) if hasattr(part, "needs")]
        return Needs(
            reference=any(n.reference for n in ours),
            values=any(n.values for n in ours),
            greedy_baseline=any(n.greedy_baseline for n in ours),
            min_group_size=max(n.min_group_size for n in ours),
            advised_group_size=max(n.advised_group_size for n in ours),
        )

    @property
    def couples_groups(self) -> bool:
        return self.objective.couples_groups

    def shape(self, samples: Samples) -> Samples:
        return samples

    def advantages(self, samples: Samples) -> Advantages:
        return self.estimator.advantages(samples)

    def loss(self, out: TokenOutputs, batch: Batch) -> dict[str, LossTerm]:
        return self.objective.loss(out, batch)

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        return self.objective.metrics(out, batch)

    def state_dict(self) -> dict[str, Any]:
        """What must survive a resume. Neither GVPO nor GRPO remembers anything from step to step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError(f"{self.name} has no state, but the checkpoint holds {sorted(state)}")


def make(name: str, **options: Any) -> Algorithm:
    """The algorithm with these settings; an unknown setting is an error that lists the known ones."""
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    parts = ALGORITHMS[name]
    known = settings(name)
    for key in options:
        if key not in known:
            raise unknown(f"setting of {name}", key, known)
    estimator = parts.estimator(**_only(parts.estimator, options))
    same = parts.objective is parts.estimator
    objective = estimator if same else parts.objective(**_only(parts.objective, options))
    return Algorithm(name, estimator, objective)


def settings(name: str) -> dict[str, tuple[Any, Any]]:
    """Name → (type, default) of every setting of an algorithm."""
    parts = ALGORITHMS[name]
    found: dict[str, tuple[Any, Any]] = {}
    for part in dict.fromkeys((parts.estimator, parts.objective)):
        hints = typing.get_type_hints(part)
        found |= {f.name: (hints[f.name], f.default) for f in dataclasses.fields(part)}
    return found


def _only(part: type, options: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(part)}
    return {key: value for key, value in options.items() if key in names}


def schema(name: str) -> type:
    """The settings of an algorithm as one frozen dataclass, for the configuration: `name`, then the parts' fields."""
    fields: list[Any] = [("name", str, dataclasses.field(default=name))]
    fields += [(key, kind, dataclasses.field(default=default)) for key, (kind, default) in settings(name).items()]
    parts = (ALGORITHMS[name].estimator, ALGORITHMS[name].objective)  # whose source explains the settings
    return dataclasses.make_dataclass(
        f"{name.title()}Settings", fields, frozen=True, namespace={"parts": parts, "__doc__": ALGORITHMS[name].summary}
    )
