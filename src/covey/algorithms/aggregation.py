"""Aggregation of the loss per token to one number, independent of the split into micro-batches.

    token-mean               Σ over all tokens / number of tokens
    seq-mean-token-sum       Σ over an episode, mean over episodes
    seq-mean-token-mean      mean over an episode's tokens, mean over episodes
    seq-mean-token-sum-norm  Σ over an episode / norm_length, mean over episodes (Dr. GRPO's constant)
    GroupSum                 Σ over a group, mean over groups: for algorithms without a choice of aggregation

A loss term is a sum and its unit; `divide` divides once, by the number of units in the whole mini-batch. Episodes
without a sampled token do not count. Shapes: N episodes, R rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from covey.imports import torch
from covey.protocols import LossTerm
from covey.ranges import Tokens, check_ranges
from covey.types import Batch

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True, slots=True)
class Aggregation:
    aggregation: str = "token-mean"  # token-mean | seq-mean-token-sum | seq-mean-token-mean | seq-mean-token-sum-norm
    norm_length: Tokens | None = None  # the constant of seq-mean-token-sum-norm; null: rollout.max_tokens

    def __post_init__(self) -> None:
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(
                f"algorithm.aggregation must be one of {', '.join(AGGREGATIONS)}, got {self.aggregation!r}"
            )
        check_ranges(self, "algorithm.")

    def __call__(self, x_RT: Tensor, batch: Batch) -> LossTerm:
        x_RT = torch.where(batch.mask_RT, x_RT, torch.zeros_like(x_RT))
        match self.aggregation:
            case "token-mean":
                return LossTerm(x_RT.sum(), "tokens")
            case "seq-mean-token-mean":
                length_R = batch.length_N[batch.episode_R].clamp(min=1).to(x_RT.dtype)
                return LossTerm((x_RT.sum(-1) / length_R).sum(), "episodes")
            case "seq-mean-token-sum-norm":
                return LossTerm(x_RT.sum() / (self.norm_length or batch.max_tokens), "episodes")
            case _:
                return LossTerm(x_RT.sum(), "episodes")


@dataclass(frozen=True, slots=True)
class GroupSum:
    """Sum over a group, mean over groups. It has no settings."""

    def __call__(self, x_RT: Tensor, batch: Batch) -> LossTerm:
        return LossTerm(torch.where(batch.mask_RT, x_RT, torch.zeros_like(x_RT)).sum(), "groups")


def divide(terms: Mapping[str, LossTerm], batch: Batch) -> dict[str, Tensor]:
    """Divide each sum by the number of its units in the whole mini-batch, not in the rows of the micro-batch."""
    nonempty_N = batch.length_N > 0
    count = {
        "tokens": int(batch.length_N.sum()),
        "episodes": int(nonempty_N.sum()),
        "groups": len(batch.group_N[nonempty_N].unique()),
    }
    return {name: term.sum / max(count[term.unit], 1) for name, term in terms.items()}
