"""The data types that one stage of the pipeline passes to the next.

    Task (or Demonstration) → Turn → Episode → Group → Collected → Sample → Samples → Batch

Everything here is frozen: a stage returns new values and never changes its input.

Shape suffixes in this package:
    N  episodes          G  groups           R  token rows (an episode has one, or several where it forks)
    T  response tokens of a row, padded on the right                       V  vocabulary          K  turns
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
    """Why sampling ended: an end token, a stop string, or the token limit. An episode may also end because the model
    called the `answer` tool, or reached the limit of turns."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    ANSWER = "answer"
    TURNS = "turns"


# The settings that may cut an episode off, as `Episode.cut_by` names them.
CUT_BY = ("rollout.max_tokens", "agent.max_response_tokens", "model.context_length", "agent.max_turns")


def cut_metric(cut_by: str) -> str:
    """The name of a limit's metric, without the setting's section: episodes/cut/max_turns."""
    return f"episodes/cut/{cut_by.rpartition('.')[2]}"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of the infrastructure in an episode. A mistake of the model is never a failure."""

    cause: str  # short and countable: "reward", "agent", "timeout"
    message: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of one request. `seed` selects its random stream; `temperature=0` is greedy."""

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
    """Tokens sampled by an engine. Each has its log-prob under the sampling distribution and its policy version."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stop: StopReason


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded picture, as in a PNG or JPEG file. Two images are equal if their bytes are."""

    digest: str  # SHA-256 of `data`, in hexadecimal
    data: bytes = field(repr=False, compare=False)
    place: str = field(default="", repr=False, compare=False)  # its source, for error messages


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A picture that is read when it is needed."""

    path: str
    place: str = field(default="", repr=False, compare=False)  # of the row that names it, for error messages


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image in a token row: the `length` ids from `start` on stand for it. `grid` is its height and width in tokens,
    for models with positions in two dimensions; None for others."""

    image: Image
    start: int
    length: int
    grid: tuple[int, int] | None = None

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def shift(self) -> int:
        """How much less the position after the image advances than its number of tokens, as a negative number."""
        return 0 if self.grid is None else max(self.grid) - self.length


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the images among them."""

    ids: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """One question. `columns` holds the other columns of its data row, which rewards may read."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    answer: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    place: str = field(default="", compare=False)  # its source, for error messages: "train.jsonl, line 3"

    @property
    def where(self) -> str:
        """Its place in a file, or else its id, for error messages."""
        return self.place or f"task {self.id}"


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to imitate: its assistant messages are the training targets."""

    id: str
    messages: tuple[Mapping[str, Any], ...]  # tool calls in OpenAI's format, with arguments as objects
    tools: tuple[Mapping[str, Any], ...] | None = None  # schemas; None: not specified
    place: str = ""  # its source, for error messages: "demos.jsonl, line 3"


@dataclass(frozen=True, slots=True)
class Turn:
    """The prompt and completion of one engine call. Training uses these ids; text is never tokenised again."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stop: StopReason
    trained: bool = True  # False: part of the episode, but not trained on
    images: tuple[ImageSpan, ...] = ()  # in the prompt
    reward: float | None = None  # from the environment, a tool or the agent; None: the turn received none
    state: str | None = None  # key of the situation in which it was sampled; None: its prompt with images
    role: str | None = None  # the role that generated the turn, if an episode has several


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool call and its outcome. `error` is a mistake of the model, as a short name that can be counted."""

    tool: str
    seconds: float
    error: str | None = None  # malformed | unknown_tool | bad_arguments | raised | deadline | image
    detail: str = ""  # where the tool's own code raised, or what was wrong; for the user, not shown to the model
    arguments: Mapping[str, Any] | None = None  # as the model wrote them; None: unreadable, or not a tool's


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task. In `rewards`, None means not scored; 0.0 is a score."""

    task: Task
    turns: tuple[Turn, ...]
    messages: tuple[Mapping[str, Any], ...]
    rewards: RewardTable = field(default_factory=dict)
    stop: StopReason | None = None
    failure: Failure | None = None
    answer: str | None = None  # the argument of the tool call that ended the episode
    given: RewardTable | None = None  # rewards reported by an environment or an external program
    tools: tuple[ToolUse, ...] = ()
    seconds: float = 0.0  # from the first prompt to the score
    cut_by: str | None = None  # the limit that cut it off: one of CUT_BY, or `request` for a limit set by the agent

    @property
    def final_answer(self) -> str:
        """The argument of the `answer` tool, or else the last assistant text. Examples in the task's own messages do
        not count."""
        if self.answer is not None:
            return self.answer
        for message in reversed(self.messages[len(self.task.messages) :]):
            if message["role"] == "assistant":
                return str(message["content"])
        return ""

    @property
    def response_tokens(self) -> int:
        return sum(len(turn.completion_ids) for turn in self.turns)

    @property
    def roles(self) -> list[str]:
        """The roles of its turns, in the order of their first turns."""
        return list(dict.fromkeys(turn.role for turn in self.turns if turn.role is not None))

    @property
    def turn_rewards(self) -> list[float]:
        """The rewards of the turns that received one."""
        return [turn.reward for turn in self.turns if turn.reward is not None]

    @property
    def reported(self) -> float | None:
        """The `reward` that was reported in `given`, or else the sum of those of the roles, plus the rewards of the
        turns; None if nothing was reported."""
        table = self.given or {}
        values = [value for role in self.roles if (value := table.get(role)) is not None]
        outcome = table["reward"] if "reward" in table else sum(values) if values else None
        return outcome if not self.turn_rewards else (outcome or 0.0) + sum(self.turn_rewards)

    def outcomes(self, reward: str) -> dict[str | None, float]:
        """What the policy achieved by a reward: its score, under None. If that is only the sum of the scores of roles,
        which may cancel, the score of each trained role."""
        score = self.rewards.get(reward)
        own = {role: s for role in self.roles if (s := self.rewards.get(f"{reward}/{role}")) is not None}
        turns = self.turn_rewards if reward == "given" else []
        trained = {turn.role for turn in self.turns if turn.trained} & own.keys()
        if trained and score == sum(own.values()) + sum(turns):
            return {role: own[role] for role in own if role in trained}
        return {} if score is None else {None: score}

    @property
    def counts_reported(self) -> bool:
        """Whether what was reported counts: false if a condition (`reward.only_if`) of the reward `given` failed."""
        return self.rewards.get("given/only_if", 1.0) == 1.0


@dataclass(frozen=True, slots=True)
class Group:
    """All attempts at one task. Groups are never split, from sampling to loss."""

    task: Task
    episodes: tuple[Episode, ...]
    baseline: Episode | None = None  # the greedy attempt, for ReMax


@dataclass(frozen=True, slots=True)
class Collected:
    """The episodes of one step: groups to learn from, in task order, and statistics of the others."""

    groups: tuple[Group, ...]
    zero_variance: tuple[Group, ...] = ()  # filtered out, because their rewards do not differ
    refills: int = 0  # how often new tasks were sampled to replace them
    failures: Mapping[str, int] = field(default_factory=dict)  # failed episodes, by cause
    examples: Mapping[str, str] = field(default_factory=dict)  # one message for each cause
    dropped: int = 0  # groups left with too few episodes after failures
    reused: int = 0  # groups that an earlier step has already learned from
    attempts: int = 0  # all sampled episodes, including those that failed or were filtered out
    cut: Mapping[str, int] = field(default_factory=dict)  # attempts that were cut off, by `Episode.cut_by`
    curriculum: Mapping[str, float] = field(default_factory=dict)  # metrics of data.sampler
    opponent: Mapping[str, float] = field(default_factory=dict)  # metrics of agent.opponents


@dataclass(frozen=True, slots=True)
class Sample:
    """One token row: a prompt and its response. `mask` is True on sampled tokens only."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]  # under the sampling distribution; 0.0 outside the mask
    versions: tuple[int, ...]
    episode: int  # index into the step's episodes
    images: tuple[ImageSpan, ...] = ()  # in the prompt and in the response, which counts on from the prompt
    # The prompt that a teacher reads instead; (): it does not score this row; None: the same prompt.
    teacher_prompt_ids: tuple[int, ...] | None = None
    turns: tuple[tuple[int, int, int], ...] = ()  # number in the episode, and first and last + 1 response token

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def prompt_images(self) -> tuple[ImageSpan, ...]:
        return tuple(span for span in self.images if span.start < len(self.prompt_ids))


@dataclass(frozen=True, slots=True)
class Unfiltered:
    """All attempts of a step, including groups that were filtered out."""

    group_N: Tensor
    rewards: Mapping[str, Tensor]
    longest_N: Tensor
    truncated_N: Tensor


@dataclass(frozen=True, slots=True)
class Turns:
    """The K turns of a step, in order of episodes and time, for estimators that read them."""

    episode_K: Tensor  # int64
    number_K: Tensor  # int64, 0, 1, … in its episode
    reward_K: Tensor  # float64, what it adds to the total reward; NaN if it received none
    state_K: Tensor  # int64, equal for the turns of a group that were sampled in the same state
    turn_RT: Tensor  # int64, the turn of each response token; -1 for tokens of no turn


@dataclass(frozen=True, slots=True)
class Samples:
    """All samples of a step: N episodes in G groups, as R token rows. Episode columns first, then token columns."""

    rows: tuple[Sample, ...]
    group_N: Tensor  # int64, the group of each episode, 0..G-1 in order
    rewards: Mapping[str, Tensor]  # name → [N] float64, NaN if not scored
    weights: Mapping[str, float]  # weight of each named reward in the total reward
    longest_N: Tensor  # int64, tokens of the longest turn
    truncated_N: Tensor  # bool, cut off by a token limit
    episode_R: Tensor  # int64
    mask_RT: Tensor  # bool, sampled tokens
    old_logprobs_RT: Tensor  # the engine's log-probs, or the learner's own under the same weights
    sampling_logprobs_RT: Tensor | None = None  # the engine's log-probs, if `old_logprobs_RT` are the learner's
    ref_logprobs_RT: Tensor | None = None
    full_kl_RT: Tensor | None = None  # KL to the reference over the whole vocabulary
    teacher_logprobs_RT: Tensor | None = None
    teacher_top: TeacherTop | None = None
    values_RT: Tensor | None = None
    score_norms_RT: Tensor | None = None  # squared norm of ∂ log π / ∂ logits
    token_rewards_RT: Tensor | None = None  # rewards that shapers added to single tokens, 0 elsewhere
    baseline_rewards_G: Tensor | None = None  # reward of the greedy attempt at each task
    unfiltered: Unfiltered | None = None  # set if groups were filtered out
    turns: Turns | None = None  # if the algorithm reads them
    roles: tuple[tuple[int, str], ...] = ()  # if rewards name roles: the step's episode and the role of each of the N
    task_N: Tensor | None = None  # int64, if rewards name roles: the task of each of the N, 0, 1, … in order
    temperature: float = 1.0
    max_tokens: int = 1  # limit of a completion

    @property
    def episodes(self) -> int:
        return len(self.group_N)

    @property
    def groups(self) -> int:
        return int(self.group_N.max()) + 1 if len(self.group_N) else 0

    def tasks(self) -> Tensor:
        """The task of each episode, [N]: its group, or that of all roles' groups."""
        return self.group_N if self.task_N is None else self.task_N

    def lengths(self) -> Tensor:
        """Sampled tokens of each episode, [N]."""
        return self.group_N.new_zeros(self.episodes).index_add(0, self.episode_R, self.mask_RT.sum(-1))

    def outcome_reward(self) -> Tensor:
        """Weighted sum of the named rewards, [N]. A missing reward counts as 0."""
        total = self.group_N.new_zeros(len(self.group_N), dtype=self.old_logprobs_RT.dtype)
        for name, column in self.rewards.items():
            total = total + self.weights[name] * column.to(total.dtype).nan_to_num(nan=0.0)
        return total

    def total_reward(self) -> Tensor:
        """`outcome_reward` plus the token rewards that shapers added, [N]."""
        total = self.outcome_reward()
        if self.token_rewards_RT is not None:
            total = total.index_add(0, self.episode_R, self.token_rewards_RT.sum(-1).to(total.dtype))
        return total

    def unfiltered_reward(self, name: str) -> tuple[Tensor, Tensor]:
        """A reward and the group of each attempt, including groups that were filtered out."""
        source = self.unfiltered or self
        return source.rewards[name], source.group_N


@dataclass(frozen=True, slots=True)
class TeacherTop:
    """A teacher's K most likely tokens before each token and their log-probs, [R, T, K]."""

    ids: Tensor
    logprobs: Tensor

    def __getitem__(self, index: Any) -> TeacherTop:
        return TeacherTop(self.ids[index], self.logprobs[index])

    def to(self, device: Any) -> TeacherTop:
        return TeacherTop(self.ids.to(device), self.logprobs.to(device))


ROW_COLUMNS = (  # of a Batch
    *("row_R", "episode_R", "mask_RT", "old_logprobs_RT"),
    *("ref_logprobs_RT", "teacher_top", "advantages_RT", "returns_RT", "values_RT", "chosen_RT"),
)


@dataclass(frozen=True, slots=True)
class Batch:
    """A mini-batch of whole groups, or one micro-batch of it.

    Episode columns always cover the whole mini-batch. Token columns cover `rows`: all rows of the mini-batch, or those
    of one micro-batch, whose `episode_R` points into the episode columns. If micro-batches split what the loss couples,
    a first pass without gradient sets `policy_sum_N`, Σ log π of every episode of the mini-batch, or `chosen_RT`.
    """

    rows: tuple[Sample, ...]
    group_N: Tensor
    rewards_N: Tensor
    length_N: Tensor  # sampled tokens of each episode
    old_sum_N: Tensor
    ref_sum_N: Tensor | None
    policy_sum_N: Tensor | None
    row_R: Tensor  # index of each row in Samples.rows
    episode_R: Tensor
    mask_RT: Tensor
    old_logprobs_RT: Tensor
    ref_logprobs_RT: Tensor | None
    advantages_RT: Tensor
    returns_RT: Tensor | None = None
    values_RT: Tensor | None = None
    chosen_RT: Tensor | None = None  # bool, tokens that the loss chose out of the whole mini-batch, in a first pass
    teacher_top: TeacherTop | None = None
    temperature: float = 1.0
    max_tokens: int = 1  # limit of a completion
    epoch: int = 0  # how often the step's samples were trained on before

    @property
    def groups(self) -> int:
        return int(self.group_N.max()) + 1 if len(self.group_N) else 0

    def take(self, index: Sequence[int]) -> Batch:
        """The mini-batch with only some of its rows."""
        at = self.episode_R.new_tensor(list(index), device="cpu").to(self.episode_R.device, non_blocking=True)
        columns = {name: getattr(self, name) for name in ROW_COLUMNS}
        taken: dict[str, Any] = {name: None if column is None else column[at] for name, column in columns.items()}
        return replace(self, rows=tuple(self.rows[i] for i in index), **taken)

    def to(self, device: Any) -> Batch:
        columns = {name: getattr(self, name) for name in self.__slots__}
        moved: dict[str, Any] = {name: x.to(device) for name, x in columns.items() if hasattr(x, "to")}
        return replace(self, **moved)


@dataclass(frozen=True)
class TaskSet:
    """The tasks of a run."""

    train: tuple[Task, ...]
    validation: tuple[Task, ...]
    reward: str | None  # the default reward of these tasks
    description: str
    warnings: tuple[str, ...] = ()
