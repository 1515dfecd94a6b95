"""The interfaces of Covey. Packages of one layer use each other only through these.

Where each is implemented:

    Estimator      algorithms/*            Reward         rewards/*
    Objective      algorithms/*            GroupSource    rollout/collector.py
    Agent          agents/*                Learner        learner/learner.py
    RolloutEngine  rollout/embedded/, rollout/vllm/
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from covey.errors import EpisodeError
from covey.types import (
    Batch,
    Collected,
    Completion,
    Episode,
    Group,
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
    """The inputs that an algorithm needs. Only these are computed."""

    reference: bool = False  # log-probs under the start model
    proximal: bool = False  # log-probs of the sampled tokens recomputed by the learner
    full_kl: bool = False  # KL to the reference over the vocabulary, with gradient, in every update
    sample_full_kl: bool = False  # the same once per step, without gradient
    values: bool = False  # values of a critic
    greedy_baseline: bool = False  # a greedy attempt at each task
    min_group_size: int = 1
    advised_group_size: int = 1  # smaller groups work, but poorly: a warning


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages, [N] (one per episode) or [R, T] (token-level estimators). Returns are the targets of a critic."""

    values: Tensor
    returns: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """Scores of the response tokens under the current policy, [R, T]; zero outside the mask."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None = None
    full_kl: Tensor | None = None
    is_argmax: Tensor | None = None  # whether the token is the most likely one


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A sum over units. The learner divides it once, by their count over the whole mini-batch."""

    sum: Tensor
    unit: Unit


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """Values per response token, [R, T], for the episode viewer."""

    advantage: Tensor
    ratio: Tensor
    entropy: Tensor


class Estimator(Protocol):
    @property
    def needs(self) -> Needs: ...

    def advantages(self, samples: Samples) -> Advantages:
        """The advantages of the whole step at once: some estimators normalise over it."""
        ...


class TokenLoss(Protocol):
    """The policy loss of each token. The algorithm's `Aggregation` sums it."""

    term: ClassVar[str]  # its name among the loss terms
    couples: ClassVar[Couples]  # what a token's loss depends on besides its own log-prob
    on_policy_only: ClassVar[bool]  # True if it is only correct for the policy that sampled

    def loss(self, out: TokenOutputs, batch: Batch) -> Tensor: ...

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics: ...


class Objective(Protocol):
    @property
    def couples(self) -> Couples:
        """What the loss couples. If micro-batches split it, `Batch.policy_sum_N` covers all of it."""
        ...

    def loss(self, out: TokenOutputs, batch: Batch) -> dict[str, LossTerm]: ...

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        """Metrics of a whole mini-batch, from the outputs before the update."""
        ...


class Shaper(Protocol):
    def shape(self, samples: Samples) -> tuple[Samples, Metrics]:
        """Called after annotate. Changes rewards or masks (overlong, truncated answers, KL in the reward)."""
        ...


class Algorithm(Estimator, Objective, Shaper, Protocol):
    """An estimator, an objective and shapers under one name, with vetted defaults."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class RolloutEngine(Protocol):
    """Samples from the policy of `version`. It is paused while the learner updates, and then receives the new
    weights."""

    owns_weights: bool  # True: it has its own weights and kernels, so its log-probs differ from the learner's
    version: int
    generated_tokens: int
    on_finished: Callable[[], None]  # called for every completion, on any thread

    def metrics(self) -> Metrics:
        """Additional counters since the engine started."""
        ...

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion: ...

    async def publish(self, weights: Any, version: int) -> None: ...

    async def pause(self) -> None:
        """Stop sampling until `resume`; memory may be released. Weights may be published in between."""
        ...

    async def resume(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the model, and why it stopped."""

    text: str
    stop: StopReason
    turn: Turn | None = None


class NoRoom(Exception):
    """The token limit of the episode, or the model's context, is exhausted: no further reply can be sampled."""


class Policy(Protocol):
    """The model as an agent sees it: an engine with the episode's sampling settings and random stream. Records turns.

    When messages continue an earlier reply, its tokens are kept as they were sampled.
    """

    @property
    def turns(self) -> Sequence[Turn]: ...

    def render(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> tuple[int, ...]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def cut(self, text: str, tokens: int) -> str:
        """Truncate a text to at most `tokens` tokens."""
        ...

    def plain(self, text: str) -> str:
        """Escape text from outside, such as a tool's, so that nothing in it becomes a control token."""
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
        """Override `temperature` and `top_p` only for turns that are not trained on."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """A context in which the episode's time limit is paused."""
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
        """Raises `NoRoom` if no further token may be sampled."""
        ...

    def remember(self, message: Mapping[str, Any]) -> None:
        """Set how the last reply appears in the messages of later turns, if not as its text alone."""
        ...

    async def chat(self, messages: Messages) -> str: ...


class Agent(Protocol):
    def opening(self, task: Task) -> tuple[Messages, Sequence[Mapping[str, Any]] | None]:
        """The messages and tools of the first prompt."""
        ...

    async def run(self, policy: Policy, task: Task) -> Episode: ...


@dataclass(frozen=True, slots=True)
class Done:
    """Returned by an environment's step to end the episode, with its reward and last messages."""

    reward: float | Mapping[str, float | None] | None = None  # in a table, "reward" is trained on, others are recorded
    messages: Messages = ()


class Environment(Protocol):
    """The environment of one episode. Methods may be async; `close` or `aclose` is called at the end, if defined."""

    def reset(self, task: Task) -> Any:
        """The first messages for the model: messages, a text, or None for the task's own."""
        ...

    def step(self, reply: str) -> Any:
        """The response to a reply: new messages, a text, or `Done`."""
        ...


@runtime_checkable
class Reward(Protocol):
    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def groupwise(self) -> bool:
        """True if a reward compares the attempts at a task, so that they are scored together."""
        ...

    async def __call__(self, task: Task, episode: Episode) -> RewardTable: ...

    async def group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[RewardTable | EpisodeError]:
        """Rewards of all attempts at a task, or an error for each attempt that could not be scored."""
        ...


class GroupSource(Protocol):
    async def next(self) -> Collected:
        """The scored groups of one step, in task order, filtered and refilled."""
        ...

    def policy_updated(self, version: int) -> None: ...


class Curriculum(Protocol):
    """Chooses tasks by what was observed of them (`data.sampler`)."""

    def observe(self, step: int, groups: Sequence[Group]) -> Metrics: ...

    def state(self, steps: Collection[int]) -> dict[str, Any]:
        """The state to checkpoint, with the tasks that were drawn for these steps."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Learner(Protocol):
    dtype: torch.dtype  # of the working weights

    @property
    def device(self) -> torch.device: ...

    def annotate(self, samples: Samples, needs: Needs) -> Samples: ...

    def update(self, batch: Batch, algorithm: Algorithm) -> tuple[Metrics, TokenTrace]:
        """One optimiser step on a mini-batch of whole groups. The trace is in the order of `batch.rows`."""
        ...

    def weights(self) -> Any: ...

    def offload(self) -> None:
        """Release memory that the engine can use while it samples."""
        ...

    def reload(self) -> None: ...

    def save(self, folder: Path) -> None:
        """Write model and optimiser state for a checkpoint (learner/saving.py)."""
        ...

    def counters(self) -> dict[str, Any]:
        """The remaining state of a checkpoint, as JSON values: counters and the loss scale."""
        ...
