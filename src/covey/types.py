"""The nouns of Covey: what one stage of the pipeline passes to the next.

    Task (or Demonstration) → Turn → Episode → Group → Collected → Sample → Samples → Batch

Everything here is frozen: a stage reads what it is given and returns something new.

Shape suffixes used in this package:
    N  episodes          G  groups           R  token rows (an episode has one, or several where it forks)
    T  response tokens of a row, padded on the right                       V  vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from covey.ranges import AnyTemperature, PositiveShare, ShareBelowOne, StopText, Tokens, TopK, check_ranges

if TYPE_CHECKING:
    from torch import Tensor

Messages = Sequence[Mapping[str, Any]]
RewardTable = Mapping[str, "float | None"]


class StopReason(StrEnum):
    """Why sampling ended: a token of the model's, a string of the user's, or the limit. The last two end an episode
    only: a tool that ends it was called (`answer`), or it may take no further turn."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    ANSWER = "answer"
    TURNS = "turns"


# Settings that may end an episode before its agent is done, as `Episode.cut_by` names them.
CUT_BY = ("rollout.max_tokens", "agent.max_response_tokens", "model.context_length", "agent.max_turns")


def cut_metric(cut_by: str) -> str:
    """The metric of a limit, without the setting's section: episodes/cut/max_turns."""
    return f"episodes/cut/{cut_by.rpartition('.')[2]}"


@dataclass(frozen=True, slots=True)
class Failure:
    """What the infrastructure did wrong in an episode. A model's own mistake is never a failure."""

    cause: str  # short and countable: "reward", "agent", "timeout"
    message: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. `seed` is the request's own random stream; `temperature=0` is greedy."""

    temperature: AnyTemperature = 1.0
    top_p: PositiveShare = 1.0
    top_k: TopK = 0  # 0: no limit
    min_p: ShareBelowOne = 0.0
    max_tokens: Tokens = 256
    stop: tuple[StopText, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(self, "")


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled: ids, the log-prob of each under the distribution it was drawn from, and the
    policy version that drew it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stop: StopReason


@dataclass(frozen=True, slots=True)
class Task:
    """One question. Columns that are not the question travel in `columns` to the rewards."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    answer: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    place: str = field(default="", compare=False)  # where it stands, for messages: "train.jsonl, line 3"

    @property
    def where(self) -> str:
        """For messages: the place in a file, or else its id."""
        return self.place or f"task {self.id}"


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to imitate: what its assistant says is what the model should say."""

    id: str
    messages: tuple[Mapping[str, Any], ...]  # tool calls in OpenAI's form, their arguments as objects
    tools: tuple[Mapping[str, Any], ...] | None = None  # schemas; None: it does not say
    place: str = ""  # where it stands, for messages: "demos.jsonl, line 3"


@dataclass(frozen=True, slots=True)
class Turn:
    """What the engine was given and what it sampled. Text is never re-tokenised for training."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stop: StopReason
    trained: bool = True  # False: sampled for the episode's sake, and not learned from


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool call of an episode and what became of it. `error` is the model's mistake: what it got wrong, countable."""

    tool: str
    seconds: float
    error: str | None = None  # malformed | unknown_tool | bad_arguments | raised | deadline
    detail: str = ""  # where the tool's own code raised; for the user, not shown to the model


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task. In `rewards`, None means never scored and 0.0 is a score."""

    task: Task
    turns: tuple[Turn, ...]
    messages: tuple[Mapping[str, Any], ...]
    rewards: RewardTable = field(default_factory=dict)
    stop: StopReason | None = None
    failure: Failure | None = None
    answer: str | None = None  # what a tool that ends the episode was given
    given: RewardTable | None = None  # what an environment, or the program that played the episode, says it is worth
    tools: tuple[ToolUse, ...] = ()
    seconds: float = 0.0  # from its first prompt to its score
    cut_by: str | None = (
        None  # one of CUT_BY that ended it early, or `request`: a limit that the agent itself asked for
    )

    @property
    def final_answer(self) -> str:
        """What the `answer` tool was given, or else the last assistant text of the attempt; worked examples in the
        task's own messages do not count."""
        if self.answer is not None:
            return self.answer
        for message in reversed(self.messages[len(self.task.messages) :]):
            if message["role"] == "assistant":
                return str(message["content"])
        return ""

    @property
    def response_tokens(self) -> int:
        return sum(len(turn.completion_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Group:
    """The covey: the attempts at one task. Groups are atomic from sampling to loss."""

    task: Task
    episodes: tuple[Episode, ...]
    baseline: Episode | None = None  # ReMax: the greedy attempt


@dataclass(frozen=True, slots=True)
class Collected:
    """What a source hands over for one step: groups to learn from, in task order, and what became of the rest."""

    groups: tuple[Group, ...]
    zero_variance: tuple[Group, ...] = ()  # set aside because their rewards do not differ
    refills: int = 0  # how often fresh tasks were sampled in their place
    failures: Mapping[str, int] = field(default_factory=dict)  # episodes that failed, by cause
    examples: Mapping[str, str] = field(default_factory=dict)  # a message for each cause
    dropped: int = 0  # groups of which too little was left
    reused: int = 0  # of the groups: those that an earlier step has learned from already
    attempts: int = 0  # all episodes that were sampled: also those that failed, or whose group is left out
    cut: Mapping[str, int] = field(default_factory=dict)  # of the attempts: those cut off, by `Episode.cut_by`


@dataclass(frozen=True, slots=True)
class Sample:
    """One token row: a prompt and what followed it. `mask` is 1 on sampled ids only."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]  # under the sampling distribution; 0.0 where mask is 0
    versions: tuple[int, ...]
    episode: int  # index into the step's episodes

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True)
class Seen:
    """All attempts of a step, with those at tasks that were filtered out."""

    group_N: Tensor
    rewards: Mapping[str, Tensor]
    longest_N: Tensor
    truncated_N: Tensor


@dataclass(frozen=True, slots=True)
class Samples:
    """A whole step: N episodes in G groups, as R token rows. Episode columns first, token columns second."""

    rows: tuple[Sample, ...]
    group_N: Tensor  # int64, the group of each episode, 0..G-1 in order
    rewards: Mapping[str, Tensor]  # name → [N] float64, NaN where never scored
    weights: Mapping[str, float]  # how the named rewards add up
    longest_N: Tensor  # int64, tokens of the longest turn
    truncated_N: Tensor  # bool, cut off by the limit
    episode_R: Tensor  # int64
    mask_RT: Tensor  # bool, sampled tokens
    old_logprobs_RT: Tensor  # log-probs the tokens were sampled with, or the learner's own of the same policy
    sampling_logprobs_RT: Tensor | None = None  # log-probs they were sampled with, where the old ones are the learner's
    ref_logprobs_RT: Tensor | None = None
    full_kl_RT: Tensor | None = None  # KL to the reference over the whole vocabulary
    values_RT: Tensor | None = None
    token_rewards_RT: Tensor | None = None  # what shapers add to sampled tokens; 0 elsewhere
    baseline_rewards_G: Tensor | None = None  # of a greedy attempt at each task
    seen: Seen | None = None  # what there was before groups were filtered, if any were
    temperature: float = 1.0
    max_tokens: int = 1  # the longest answer allowed

    @property
    def episodes(self) -> int:
        return len(self.group_N)

    @property
    def groups(self) -> int:
        return int(self.group_N.max()) + 1 if len(self.group_N) else 0

    def lengths(self) -> Tensor:
        """Sampled tokens of each episode, [N]."""
        return self.group_N.new_zeros(self.episodes).index_add(0, self.episode_R, self.mask_RT.sum(-1))

    def outcome_reward(self) -> Tensor:
        """Weighted sum of the named rewards, [N]. A reward that was never given adds nothing."""
        total = self.group_N.new_zeros(len(self.group_N), dtype=self.old_logprobs_RT.dtype)
        for name, column in self.rewards.items():
            total = total + self.weights[name] * column.to(total.dtype).nan_to_num(nan=0.0)
        return total

    def total_reward(self) -> Tensor:
        """The same with what shapers added to single tokens."""
        total = self.outcome_reward()
        if self.token_rewards_RT is not None:
            total = total.index_add(0, self.episode_R, self.token_rewards_RT.sum(-1).to(total.dtype))
        return total

    def observed(self, name: str) -> tuple[Tensor, Tensor]:
        """A reward and the group of each attempt, with those of groups that were filtered out."""
        seen = self.seen or self
        return seen.rewards[name], seen.group_N


@dataclass(frozen=True, slots=True)
class Batch:
    """A mini-batch of whole groups, and the rows of it that a loss sees at once.

    Episode columns cover the whole mini-batch; token columns cover `rows`: all rows of the mini-batch, or those of one
    micro-batch, whose `episode_R` points into the episode columns. `policy_sum_N` is set when a micro-batch splits a
    group: Σ log π of every episode of the mini-batch from a first pass without gradient, so that a loss that couples
    the members of a group sees all of them.
    """

    rows: tuple[Sample, ...]
    group_N: Tensor
    rewards_N: Tensor
    length_N: Tensor  # sampled tokens of each episode
    old_sum_N: Tensor
    ref_sum_N: Tensor | None
    policy_sum_N: Tensor | None
    row_R: Tensor  # place of each row in Samples.rows
    episode_R: Tensor
    mask_RT: Tensor
    old_logprobs_RT: Tensor
    ref_logprobs_RT: Tensor | None
    advantages_RT: Tensor
    returns_RT: Tensor | None = None
    values_RT: Tensor | None = None
    temperature: float = 1.0
    max_tokens: int = 1  # the longest answer allowed
    epoch: int = 0  # how often the step's samples were learned from before

    @property
    def groups(self) -> int:
        return int(self.group_N.max()) + 1 if len(self.group_N) else 0

    def take(self, index: Sequence[int]) -> Batch:
        """The same mini-batch seen through some of its rows."""
        at = self.episode_R.new_tensor(list(index), device="cpu").to(self.episode_R.device, non_blocking=True)

        def pick(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[at]

        return replace(
            self,
            rows=tuple(self.rows[i] for i in index),
            row_R=self.row_R[at],
            episode_R=self.episode_R[at],
            mask_RT=self.mask_RT[at],
            old_logprobs_RT=self.old_logprobs_RT[at],
            ref_logprobs_RT=pick(self.ref_logprobs_RT),
            advantages_RT=self.advantages_RT[at],
            returns_RT=pick(self.returns_RT),
            values_RT=pick(self.values_RT),
        )


# -- What a run trains on and is tested on -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskSet:
    train: tuple[Task, ...]
    validation: tuple[Task, ...]
    reward: str | None  # what scores these tasks when the user names no reward
    description: str
    warnings: tuple[str, ...] = ()
