"""The verbs of Covey. Rooms of one layer know each other only through these.

Each has one obvious implementation and room for more:

    Estimator      algorithms/*            Reward         rewards/*
    Objective      algorithms/*            GroupSource    rollout/collector.py
    Agent          agents/*                Learner        learner/learner.py
    RolloutEngine  rollout/embedded/, rollout/vllm/
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from covey.errors import EpisodeError
from covey.types import (
    Batch,
    Collected,
    Completion,
    Episode,
    Messages,
    RewardTable,
    Samples,
    Sampling,
    StopReason,
    Task,
    Turn,
)

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

Unit = Literal["tokens", "episodes", "groups"]
Couples = Literal["nothing", "episodes", "groups"]
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Needs:
    """What an algorithm must be given. Nothing here is computed unless asked for."""

    reference: bool = False  # log-probs of the start model
    proximal: bool = False  # log-probs of the sampled tokens as the learner sees them
    full_kl: bool = False  # KL to the reference over the vocabulary, with gradient, in every update
    sample_full_kl: bool = False  # the same of the samples, once
    values: bool = False  # a critic's
    greedy_baseline: bool = False  # a greedy attempt at each task
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
    first_choice: Tensor | None = None  # whether no other token is likelier


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


class TokenLoss(Protocol):
    """The policy's part of an objective: a loss of each token. Who sums it up is the algorithm's `Aggregation`."""

    term: ClassVar[str]  # its name among the terms of the loss
    couples: ClassVar[Couples]  # whose log-probs of the moment the loss of a token depends on besides its own
    on_policy_only: ClassVar[bool]  # True if it is wrong for any policy but the one that sampled

    def loss(self, out: TokenOutputs, batch: Batch) -> Tensor: ...

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics: ...


class Objective(Protocol):
    @property
    def couples(self) -> Couples:
        """What a loss must see as a whole; where a micro-batch splits it, `Batch.policy_sum_N` tells of the rest."""
        ...

    def loss(self, out: TokenOutputs, batch: Batch) -> dict[str, LossTerm]: ...

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        """Statistics of a whole mini-batch, from what the policy said before the update."""
        ...


class Shaper(Protocol):
    def shape(self, samples: Samples) -> tuple[Samples, Metrics]:
        """After annotate: what changes rewards or masks (overlong, truncated answers, KL in the reward)."""
        ...


class Algorithm(Estimator, Objective, Shaper, Protocol):
    """An estimator, an objective and shapers under one name with vetted defaults."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class RolloutEngine(Protocol):
    """Samples with the policy of `version`. While the learner works it is paused; then weights are published."""

    owns_weights: bool  # True: a copy of the weights and kernels of its own, so its log-probs differ from the learner's
    version: int
    generated_tokens: int
    on_finished: Callable[[], None]  # called for every answer, on any thread

    def metrics(self) -> Metrics:
        """What it counts besides, since it was started."""
        ...

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion: ...

    async def publish(self, weights: Any, version: int) -> None: ...

    async def pause(self) -> None:
        """Nothing is sampled until weights have been published and `resume` called: memory may be given back."""
        ...

    async def resume(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model said, and why it stopped."""

    text: str
    stop: StopReason
    turn: Turn | None = None  # its tokens


class NoRoom(Exception):
    """The episode's tokens, or the model's context, are used up: no further reply can be sampled."""


class Policy(Protocol):
    """What an agent talks to: an engine with this episode's sampling settings and random stream; it keeps the turns.

    Messages that go on from an earlier reply keep its tokens as they were sampled."""

    @property
    def turns(self) -> Sequence[Turn]: ...

    def render(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> tuple[int, ...]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def cut(self, text: str, tokens: int) -> str:
        """The beginning of a text that has at most so many tokens."""
        ...

    def plain(self, text: str) -> str:
        """Text from outside, a tool's for example, in which nothing is read as a token of control."""
        ...

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        trained: bool = True,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> Completion:
        """`temperature` and `top_p` other than the run's are for turns that nobody learns from."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """While it lasts, the episode's clock stands still."""
        ...

    async def ask(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        trained: bool = True,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> Reply:
        """Raises `NoRoom` where nothing more may be sampled."""
        ...

    def remember(self, message: Mapping[str, Any]) -> None:
        """How the last reply is written among the messages of later turns, where that is not its text alone."""
        ...

    async def chat(self, messages: Messages) -> str: ...


class Agent(Protocol):
    def opening(self, task: Task) -> tuple[Messages, Sequence[Mapping[str, Any]] | None]:
        """The messages and tools of its first prompt."""
        ...

    async def run(self, policy: Policy, task: Task) -> Episode: ...


@dataclass(frozen=True, slots=True)
class Done:
    """What an environment's step returns to end the episode: what it is worth, and what was said last."""

    reward: float | Mapping[str, float | None] | None = (
        None  # of a table the key "reward" is learned from, the others are measured
    )
    messages: Messages = ()


class Environment(Protocol):
    """One episode's world, with methods that are `def` or `async def`; `close` or `aclose`, if there, ends it."""

    def reset(self, task: Task) -> Any:
        """The first messages that the model is shown (messages, a text, or None for the task's own)."""
        ...

    def step(self, reply: str) -> Any:
        """What comes after a reply: new messages, a text, or `Done`."""
        ...


@runtime_checkable
class Reward(Protocol):
    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def groupwise(self) -> bool:
        """True if some reward compares the attempts at a task, so that they are scored together."""
        ...

    async def __call__(self, task: Task, episode: Episode) -> RewardTable: ...

    async def group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[RewardTable | EpisodeError]:
        """Rewards of all attempts at a task; some compare them. An attempt that could not be scored has an error."""
        ...


class GroupSource(Protocol):
    async def next(self) -> Collected:
        """Scored groups of one step, in task order, filtered and refilled."""
        ...

    def policy_updated(self, version: int) -> None: ...


class Learner(Protocol):
    dtype: torch.dtype  # of the policy as it is used

    @property
    def device(self) -> torch.device: ...

    def annotate(self, samples: Samples, needs: Needs) -> Samples: ...

    def update(self, batch: Batch, algorithm: Algorithm) -> tuple[Metrics, TokenTrace]:
        """One optimiser step on a mini-batch of whole groups. The trace has the order of `batch.rows`."""
        ...

    def weights(self) -> Any: ...

    def offload(self) -> None:
        """The engine samples: memory that it can use may be given back."""
        ...

    def reload(self) -> None: ...

    def save(self, folder: Path) -> None:
        """Model and optimiser, for a checkpoint (learner/saving.py)."""
        ...

    def counters(self) -> dict[str, Any]:
        """What else a checkpoint must know, as JSON."""
        ...
