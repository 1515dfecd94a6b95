"""The verbs of Covey. Rooms of one layer know each other only through these.

Each has one obvious implementation and room for more:

    Estimator      algorithms/*            Reward         rewards/*
    Objective      algorithms/*            GroupSource    rollout/collector.py
    Agent          agents/*                Learner        learner/learner.py
    RolloutEngine  rollout/embedded/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from covey.types import Batch, Completion, Episode, Group, Messages, RewardTable, Samples, Sampling, Task, Turn

if TYPE_CHECKING:
    from torch import Tensor

Unit = Literal["tokens", "episodes", "groups"]
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Needs:
    """What an algorithm must be given. The loop computes reference log-probs and values only if asked."""

    reference: bool = False
    values: bool = False
    greedy_baseline: bool = False
    min_group_size: int = 1
    advised_group_size: int = 1  # below it the algorithm works, but poorly: a warning


@dataclass(frozen=True, slots=True)
class Advantages:
    """[N] (one per episode) or [R, T] (token-level estimators); returns only where a critic learns from them."""

    values: Tensor
    returns: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What the current policy says of each response token, [R, T]; zero where the mask is."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None = None
    full_kl: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A sum, and what it is a sum of. The learner divides once, by the count over the whole mini-batch."""

    sum: Tensor
    unit: Unit


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """What the episode reader shows of each response token, [R, T]."""

    advantage: Tensor
    ratio: Tensor
    entropy: Tensor


class Estimator(Protocol):
    @property
    def needs(self) -> Needs: ...

    def advantages(self, samples: Samples) -> Advantages:
        """The whole step at once: some estimators normalise across it."""
        ...


class Objective(Protocol):
    @property
    def couples_groups(self) -> bool:
        """True if the loss of one episode depends on the current log-probs of its group."""
        ...

    def loss(self, out: TokenOutputs, batch: Batch) -> dict[str, LossTerm]: ...

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        """Statistics of the episodes of one micro-batch; the learner averages them over episodes."""
        ...


class Shaper(Protocol):
    def shape(self, samples: Samples) -> Samples:
        """After annotate: what changes rewards by what the policies say (KL in the reward, overlong)."""
        ...


class Algorithm(Estimator, Objective, Shaper, Protocol):
    """An estimator, an objective and shapers under one name with vetted defaults."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class RolloutEngine(Protocol):
    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion: ...

    async def publish(self, weights: Any, version: int) -> None: ...


class Policy(Protocol):
    """What an agent talks to: an engine with this episode's sampling settings and random stream; it keeps the turns."""

    @property
    def turns(self) -> Sequence[Turn]: ...

    def render(self, messages: Messages) -> tuple[int, ...]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    async def generate(self, token_ids: Sequence[int]) -> Completion: ...

    async def chat(self, messages: Messages) -> str: ...


class Agent(Protocol):
    async def run(self, policy: Policy, task: Task) -> Episode: ...


class Done(Protocol):
    """What an environment's step returns to end the episode."""

    reward: float | None


class Environment(Protocol):
    async def reset(self, task: Task) -> Messages: ...

    async def step(self, reply: str) -> Messages | Done: ...


@runtime_checkable
class Reward(Protocol):
    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def groupwise(self) -> bool:
        """True if some reward compares the attempts at a task, so that they are scored together."""
        ...

    async def __call__(self, task: Task, episode: Episode) -> RewardTable: ...

    async def group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[RewardTable]:
        """Rewards of all attempts at a task; some compare them."""
        ...


class GroupSource(Protocol):
    async def next(self) -> list[Group]:
        """Scored groups of one step, in task order."""
        ...

    def policy_updated(self, version: int) -> None: ...


class Learner(Protocol):
    def annotate(self, samples: Samples, needs: Needs) -> Samples: ...

    def update(self, batch: Batch, algorithm: Algorithm) -> tuple[Metrics, TokenTrace]:
        """One optimiser step on a mini-batch of whole groups. The trace has the order of `batch.rows`."""
        ...

    def weights(self) -> Any: ...
