"""Penalties for overlong and truncated answers, and the filter of groups without signal (dynamic sampling).

    soft overlong penalty       0 up to max − buffer, then falling linearly to −penalty at max and beyond; for an
                                episode's longest turn, because rollout.max_tokens limits turns
    truncated answers           kept, masked (excluded from the loss; their rewards still count) or penalised
                                (reward −1)
    dynamic sampling            groups of equal rewards are replaced by newly sampled ones

Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476. The two penalties are rewards of their own (`overlong`,
`truncated`), so that algorithms for several rewards treat them as such.

Shapes: N episodes, R rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from covey.ranges import Coefficient, Range, check_ranges
from covey.types import Samples

if TYPE_CHECKING:
    from torch import Tensor

Buffer = Annotated[float, Range(0, 10_000_000)]  # tokens, or a share
Refills = Annotated[int, Range(0, 1_000_000)]


@dataclass(frozen=True, slots=True)
class Shaping:
    overlong_buffer: Buffer = 0.0  # last tokens before rollout.max_tokens with a penalty; below 1: a share of it
    overlong_penalty: Coefficient = 1.0  # penalty of an answer of full length
    truncated: str = "keep"  # answers cut off by the limit: keep | mask (do not learn from them) | penalise (reward −1)

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")
        if self.truncated not in ("keep", "mask", "penalise"):
            raise ValueError(f"algorithm.truncated must be keep, mask or penalise, got {self.truncated!r}")

    def added_rewards(self) -> list[str]:
        return ["overlong"] * (self.overlong_buffer > 0) + ["truncated"] * (self.truncated == "penalise")

    def reward(self, samples: Samples) -> Samples:
        """Add the penalties as rewards."""
        if self.overlong_buffer:
            limit = samples.max_tokens
            buffer = self.overlong_buffer * limit if self.overlong_buffer < 1 else self.overlong_buffer

            def cost(longest_N: Tensor, truncated_N: Tensor) -> Tensor:
                return overlong(longest_N, limit, buffer, self.overlong_penalty)

            samples = _with_reward(samples, "overlong", cost)
        if self.truncated == "penalise":
            samples = _with_reward(samples, "truncated", lambda longest_N, truncated_N: -truncated_N.double())
        return samples

    def mask(self, samples: Samples) -> Samples:
        """With truncated=mask, remove the tokens of truncated answers from the mask."""
        if self.truncated != "mask":
            return samples
        return replace(samples, mask_RT=samples.mask_RT & ~samples.truncated_N[samples.episode_R][:, None])


def overlong(length_N: Tensor, max_tokens: float, buffer: float, penalty: float = 1.0) -> Tensor:
    """DAPO's soft penalty: with a limit of 100 and a buffer of 20, a length of 90 costs half of it."""
    over_N = (length_N.double() - (max_tokens - buffer)) / max(buffer, 1e-9)
    return -penalty * over_N.clamp(0, 1)


def _with_reward(samples: Samples, name: str, score: Callable[[Tensor, Tensor], Tensor]) -> Samples:
    """Add a reward, computed from each episode's longest turn and whether it was truncated; also for filtered
    groups."""
    assert name not in samples.rewards, name
    column_N = score(samples.longest_N, samples.truncated_N)
    every = samples.unfiltered
    if every is not None:
        every = replace(every, rewards={**every.rewards, name: score(every.longest_N, every.truncated_N)})
    rewards, weights = {**samples.rewards, name: column_N}, {**samples.weights, name: 1.0}
    return replace(samples, rewards=rewards, weights=weights, unfiltered=every)


@dataclass(frozen=True, slots=True)
class GroupFilter:
    filter_groups: bool = False  # replace groups whose rewards are all equal by newly sampled ones
    filter_metric: str | None = None  # the reward that must differ within a group; null: any that is trained on
    max_refills: Refills = 3  # times to sample again; 0: groups of equal rewards are dropped, not replaced

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")
