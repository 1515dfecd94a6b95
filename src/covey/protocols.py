"""The interfaces of Covey. Packages of one layer use each other only through these.

Where each is implemented:

    Algorithm      algorithms/*                       Policy         rollout/policy.py
    Agent          agents/*                           Reward         rewards/*
    RolloutEngine  rollout/embedded/, rollout/vllm/   Curriculum     tasks/curriculum.py
    Learner        learner/learner.py                 GroupSource    rollout/collector.py, rollout/asynchronous.py
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from covey.errors import EpisodeError
from covey.types import (
    Batch,
    Collected,
    Completion,
    Episode,
    Group,
    ImageSpan,
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
Couples = Literal["nothing", "episodes", "groups", "batch"]
Metrics = dict[str, float]
MAX_TURN_REWARD = 1e15  # as of a reward function


@dataclass(frozen=True, slots=True)
class Needs:
    """The inputs that an algorithm needs. Only these are computed."""

    reference: bool = False  # log-probs under the reference: the start model, unless it moves
    reference_every: int = 0  # steps after which the policy becomes the reference; 0: never
    proximal: bool = False  # log-probs of the sampled tokens recomputed by the learner
    full_kl: bool = False  # KL to the reference over the vocabulary, with gradient, in every update
    sample_full_kl: bool = False  # the same once per step, without gradient
    values: bool = False  # values of a critic
    score_norms: bool = False  # squared norm of ∂ log π / ∂ logits of every sampled token
    teacher: bool = False  # log-probs under a teacher
    teacher_kl: bool = False  # KL to the teacher over the vocabulary, with gradient, in every update
    teacher_top: bool = False  # KL to the teacher over its most likely tokens, with gradient, in every update
    greedy_baseline: bool = False  # a greedy attempt at each task
    turns: bool = False  # the turns of the episodes, with their rewards and states
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
    score_norms: Tensor | None = None  # squared norm of ∂ log π / ∂ logits
    teacher_kl: Tensor | None = None


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
    """The policy loss of each token. The algorithm's `Aggregation` sums it.

    If micro-batches split what the loss couples, a first pass without gradient computes the log-probs of the whole
    mini-batch. The loss finds their sum over each episode in `Batch.policy_sum_N`; if it needs something else of them,
    it has a method `first_pass(out, batch) -> Batch` that puts it there.
    """

    term: ClassVar[str]  # its name among the loss terms
    couples: ClassVar[Couples]  # what a token's loss depends on besides its own log-prob
    on_policy_only: ClassVar[bool]  # True if it is only correct for the policy that sampled

    def loss(self, out: TokenOutputs, batch: Batch) -> Tensor: ...

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics: ...


class Objective(Protocol):
    @property
    def couples(self) -> Couples:
        """What the loss couples. If micro-batches split it, `first_pass` is called first."""
        ...

    def first_pass(self, out: TokenOutputs, batch: Batch) -> Batch:
        """The mini-batch with what micro-batches share, from outputs of all its rows without gradient."""
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

    def metrics(self) -> Metrics:
        """Additional counters since the engine started."""
        ...

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> Completion:
        """`images`: the images among the ids. The embedded engine takes them; other engines need not."""
        ...

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

    @property
    def sees_images(self) -> bool: ...

    def render(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> tuple[int, ...]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def cut(self, text: str, tokens: int) -> str:
        """Truncate a text to at most `tokens` tokens."""
        ...

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        trained: bool = True,
        role: str | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> Completion:
        """`role`: the role that generates the turn, if an episode has several. Override `temperature` and `top_p` only
        for turns that are not trained on."""
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
        role: str | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> Reply:
        """Raises `NoRoom` if no further token may be sampled."""
        ...

    def remember(self, message: Mapping[str, Any]) -> None:
        """Set how the last reply appears in the messages of later turns, if not as its text alone."""
        ...

    def record_turn(self, *, reward: float | None = None, state: Any = None) -> None:
        """Set the reward of the last turn, and the state in which it was sampled: any JSON value that is equal if and
        only if the situation is the same. None changes nothing."""
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

    # A number, or a table with "reward", the rewards of roles, and others to record.
    reward: float | Mapping[str, float | None] | None = None
    messages: Messages = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """Returned by an environment's step, or by a tool, to give the turn a reward."""

    content: Any  # what the model sees next: messages or a text; of a tool, its result
    reward: float | None = None  # of the turn that led here; None: it receives none
    state: Any = None  # the state that the model is in now, for algorithms that compare turns in equal states
    # The role that generates the next turn: it sees the messages that were sent to this role, and its own replies.
    role: str | None = None


def check_turn_reward(reward: Any) -> None:
    """Raise ValueError unless the reward is None or a finite number."""
    is_number = isinstance(reward, Real)
    if reward is not None and not (is_number and abs(reward) <= MAX_TURN_REWARD):
        raise ValueError(
            f"the reward of a turn must be None or a number within ±{MAX_TURN_REWARD:g}, got {reward!r:.50}"
        )


class Environment(Protocol):
    """The environment of one episode. Methods may be async; `close` or `aclose` is called at the end, if defined."""

    def reset(self, task: Task) -> Any:
        """The first messages for the model: messages, a text, `Observation`, or None for the task's own."""
        ...

    def step(self, reply: str) -> Any:
        """The response to a reply: new messages, a text, `Observation`, or `Done`."""
        ...


@runtime_checkable
class Reward(Protocol):
    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def trained(self) -> tuple[str, ...]:
        """The rewards whose weight is not 0; all, if there are none."""
        ...

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

    def memory_note(self) -> str:
        """One line about the memory that training is planned to take."""
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
