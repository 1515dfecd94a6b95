"""Rewards are plain functions; their parameter names say what they need.

    @reward
    def exact(answer, final_answer):
        return final_answer.strip() == answer

Parameters, by name:

    answer         the task's answer                    task       the Task
    question       the text of the last user message    episode    the Episode
    final_answer   the last assistant text              (any other) a column of the data
    completion     all text that the model wrote

Names from other projects, used where the data has no such column:

    prompt         the question                         prediction, final_response    the final answer
    trajectory     all messages, as dicts

A group reward scores all attempts at a task together: its first parameter is `episodes`, and it returns a list.
A reward returns a number, None (not scored), or a dict. In a dict, the key "reward" (or the function's name) is the
reward; the other keys are extras, logged as `NAME/KEY` and never trained on, except those that name a role of the
episode, which are the rewards of these roles (rollout/roles.py).

With a worker pool, a reward runs in a worker process with a time limit, so a hang or crash costs only the episodes it
was scoring. Built-in rewards that are fast and bounded run in the training process.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeVar, overload

from covey.errors import EpisodeError, InputError, RunFailed, describe_error, nearest, unknown
from covey.images import plain_text
from covey.imports import no_exit
from covey.types import Episode, Task
from covey.workers import RemoteError, WorkerDied, WorkerPool, WorkerTimeout

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")
Columns = dict[str, float | None]

EPISODE_ARGUMENTS = ("completion", "episode", "final_answer")
OTHER_NAMES = ("final_response", "prediction", "trajectory")  # AgentFly's; columns and options take precedence
FILLED_IN = (*EPISODE_ARGUMENTS, "answer", "question", "task")  # never options
MAX_REWARD = 1e15  # squares of rewards are summed in float32, whose maximum is 3e38


class RewardError(EpisodeError):
    """A reward gave no value for an episode. Causes: `reward` (it raised or returned an invalid value),
    `reward_timeout`, `reward_crash`, or a cause that the reward itself sets."""

    def __init__(self, name: str, task_id: str, why: str, cause: str = "reward") -> None:
        super().__init__(name, task_id, why, cause)  # all of them: exceptions are pickled by their arguments
        self.name = name
        self.task_id = task_id
        self.why = why
        self.cause = cause

    def __str__(self) -> str:
        return f"reward {self.name} on task {self.task_id}: {self.why}"


@overload
def reward(fn: Function) -> Function: ...


@overload
def reward(
    fn: None = None,
    *,
    name: str | None = None,
    check: Callable[[Task], None] | None = None,
    gold: Callable[[Any], Any] | None = None,
) -> Callable[[Function], Function]: ...


def reward(
    fn: Any = None,
    *,
    name: str | None = None,
    check: Callable[[Task], None] | None = None,
    gold: Callable[[Any], Any] | None = None,
) -> Any:
    """Mark a function as a reward, optionally under another name. It stays a plain function.

    `check` is called with each task before training: it raises InputError if the reward cannot score the task, Absent
    if a package is missing. `gold` is called with each task's answer: the function that the reward parses it with,
    which raises ValueError if it cannot."""

    def mark(function: Function) -> Function:
        function.reward_name = name or function.__name__  # type: ignore[attr-defined]
        function.reward_check = check  # type: ignore[attr-defined]
        function.reward_gold = gold  # type: ignore[attr-defined]
        return function

    return mark if fn is None else mark(fn)


def inline(function: Function) -> Function:
    """Mark a built-in reward that is fast and bounded, so it runs in the training process."""
    function.reward_inline = True  # type: ignore[attr-defined]
    return function


def reward_name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "reward_name", "") or getattr(function, "__name__", type(function).__name__))


async def result_of(future: Future[Result]) -> Result:
    """Await a thread's future. Unlike asyncio.wrap_future, it may be awaited on several event loops, and cancelling one
    awaiter, or closing its loop, leaves the future and the other awaiters alone."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def notify(_: Future[Result]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(notify)
    await done.wait()
    return future.result()


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with its parsed signature."""

    name: str
    call: Callable[..., Any]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool  # it has **kwargs
    groupwise: bool
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments from the settings
    pool: WorkerPool | None = None  # None: it runs in this process
    seconds: float = math.inf

    @classmethod
    def of(cls, call: Callable[..., Any], options: Mapping[str, Any] | None = None) -> RewardFunction:
        name, options = reward_name(call), dict(options or {})
        try:
            parameters = list(inspect.signature(call).parameters.values())
        except (TypeError, ValueError) as error:
            raise InputError(f"reward {name}: its parameters cannot be read ({error})") from error
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise InputError(f"reward {name} has positional-only parameters\n  fix: arguments are given by name")
        groupwise = bool(parameters) and parameters[0].name == "episodes"
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        named = named[1:] if groupwise else named
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if not takes_all:
            check_options(name, options, [p.name for p in named if p.name not in FILLED_IN])
        return cls(
            name=name,
            call=call,
            required=tuple(p.name for p in named if p.default is p.empty and p.name not in options),
            optional=tuple(p.name for p in named if p.default is not p.empty and p.name not in options),
            takes_all=takes_all,
            groupwise=groupwise,
            options=options,
        )

    @property
    def inline(self) -> bool:
        return bool(getattr(self.call, "reward_inline", False))

    @property
    def worker_name(self) -> str:
        """Its name among the functions of the worker pool."""
        return f"reward:{self.name}"

    def call_with(self, arguments: Mapping[str, Any]) -> Any:
        """What a worker runs. One mapping, so that arguments may have any name."""
        return self.call(**arguments)

    # -- Checks before training

    def check(self, task: Task) -> None:
        """Raise if the function needs something that this task does not have."""
        known = set(self._task_arguments(task)) | set(() if self.groupwise else (*EPISODE_ARGUMENTS, *OTHER_NAMES))
        missing = [name for name in self.required if name not in known]
        if not missing:
            self._run_check(task)
            self._check_gold(task)
            return
        lines = [f"reward {self.name} asks for `{missing[0]}`, which {task.where} does not have"]
        if self.groupwise and missing[0] in EPISODE_ARGUMENTS:
            lines.append("  fix: a group reward looks at its `episodes`: [e.final_answer for e in episodes]")
        elif guess := nearest(missing[0], task.columns if missing[0] == "answer" else known):
            lines.append(f"  did you mean   {guess}?")
        lines.append(_columns_line(task))
        lines.append(f"  always there: {', '.join(sorted(known & set(FILLED_IN)))}")
        raise InputError("\n".join(lines))

    def _run_check(self, task: Task) -> None:
        """Run the reward's own check. Any exception but InputError means that a column has an unexpected type."""
        check = getattr(self.call, "reward_check", None)
        try:
            with no_exit(f"reward {self.name}"):
                if check is not None:
                    check(task)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"{task.where}: reward {self.name} cannot read its columns ({describe_error(error):.400})\n"
                f"{_columns_line(task)}"
            ) from error

    def _check_gold(self, task: Task) -> None:
        parse = getattr(self.call, "reward_gold", None)
        try:
            if parse is not None:
                parse(task.answer)
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{task.where}: reward {self.name} cannot read the answer {task.answer!r:.60} ({error!s:.200})\n"
                "  fix: correct the answer, take the task out, or use another reward (docs/rewards.md)"
            ) from error

    # -- Scoring

    async def score(self, task: Task, episode: Episode) -> Columns:
        others = {
            "final_response": episode.final_answer,
            "prediction": episode.final_answer,
            "trajectory": [dict(message) for message in episode.messages],
        }
        arguments = {**others, **self._task_arguments(task)} | {
            "completion": _completion(task, episode),
            "episode": episode,
            "final_answer": episode.final_answer,
        }
        return self._columns(task, await self._run(task, arguments), episode.roles)

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> list[Columns | RewardError]:
        """One call for all attempts, which must return one value per episode. An invalid value costs only its own."""
        values = await self._run(task, self._task_arguments(task), episodes=list(episodes))
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(episodes):
            raise RewardError(
                self.name, task.id, f"a group reward returns a list with one value for each of {len(episodes)} episodes"
            )
        return [self._columns_or_error(task, value, e.roles) for e, value in zip(episodes, values, strict=True)]

    def _columns_or_error(self, task: Task, value: Any, roles: Sequence[str]) -> Columns | RewardError:
        try:
            return self._columns(task, value, roles)
        except RewardError as error:
            return error

    def _task_arguments(self, task: Task) -> dict[str, Any]:
        """The arguments known without an episode. A missing answer stays missing rather than None."""
        question = next((plain_text(m["content"]) for m in reversed(task.messages) if m["role"] == "user"), "")
        arguments = {"prompt": question, **task.columns, "task": task, "question": question}
        return arguments if task.answer is None else arguments | {"answer": task.answer}

    async def _run(self, task: Task, arguments: Mapping[str, Any], **extra: Any) -> Any:
        missing = [name for name in self.required if name not in arguments]
        if missing:
            raise RewardError(self.name, task.id, f"it asks for `{missing[0]}`, which this task does not have")
        if not self.takes_all:
            arguments = {n: arguments[n] for n in (*self.required, *self.optional) if n in arguments}
        arguments = {**extra, **arguments, **self.options}
        try:
            if self.pool is not None:
                return await self.pool.call(self.worker_name, arguments, seconds=self.seconds)
            value = self.call(**arguments)
            return await value if inspect.isawaitable(value) else value
        except RunFailed:
            raise
        except EpisodeError as error:
            raise RewardError(self.name, task.id, str(error), error.cause) from error
        except WorkerTimeout as error:
            why = f"it took longer than reward.seconds={self.seconds:g}"
            raise RewardError(self.name, task.id, why, "reward_timeout") from error
        except WorkerDied as error:
            raise RewardError(self.name, task.id, str(error), "reward_crash") from error
        except RemoteError as error:
            raise RewardError(self.name, task.id, str(error)) from error
        except (Exception, SystemExit) as error:
            raise RewardError(self.name, task.id, describe_error(error)) from error

    def _columns(self, task: Task, value: Any, roles: Sequence[str] = ()) -> Columns:
        """The returned value as columns: the reward under the function's name, extras and the rewards of roles under
        NAME/KEY. Without a reward it is the sum of those of the roles."""
        if not isinstance(value, Mapping):
            return {self.name: self._number(task, self.name, value)}
        main = "reward" if "reward" in value else self.name
        if main not in value and any(role in value for role in roles):
            own = [value[role] for role in roles if value.get(role) is not None]
            value = {**value, main: sum(own) if own else None}
        if main not in value:
            keys = ", ".join(map(str, value)) or "none"
            raise RewardError(self.name, task.id, f"the dict it returned has no 'reward' (keys: {keys})")
        extras = {f"{self.name}/{key}": value[key] for key in value if key != main}
        return {column: self._number(task, column, v) for column, v in {self.name: value[main], **extras}.items()}

    def _number(self, task: Task, column: str, value: Any) -> float | None:
        if value is None:
            return None
        if not isinstance(value, Real):
            raise RewardError(self.name, task.id, f"{column} must be a number or None, got {value!r:.50}")
        try:
            number = float(value)
        except OverflowError:  # an integer too large for a float
            number = math.inf
        if not math.isfinite(number):
            raise RewardError(self.name, task.id, f"{column} is {number}, a reward must be finite")
        if abs(number) > MAX_REWARD:
            raise RewardError(self.name, task.id, f"{column} is {number:g}, a reward must lie within ±{MAX_REWARD:g}")
        return number


def check_options(reward: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in options:
        if key not in known and not known:
            raise InputError(f"reward.options.{reward}.{key}: the reward {reward} has no options")
        if key not in known:
            raise unknown(f"option of reward {reward}", key, known)


def _columns_line(task: Task) -> str:
    return f"  columns of the data: {', '.join(sorted(task.columns)) or 'none'}"


def _completion(task: Task, episode: Episode) -> str:
    """All assistant texts of the attempt, without worked examples in the task's own messages."""
    written = episode.messages[len(task.messages) :]
    return "\n".join(str(message["content"]) for message in written if message["role"] == "assistant")
