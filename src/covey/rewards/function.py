"""Waiting on an event loop for what a thread works out."""

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
from covey.imports import no_exit
from covey.types import Episode, Task
from covey.workers import RemoteError, WorkerDied, WorkerPool, WorkerTimeout

Result = TypeVar("Result")


async def result_of(future: Future[Result]) -> Result:
    """The same future may be awaited by many, on several event loops; whoever is cancelled does not cancel it."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def tell(_: Future[Result]) -> None:
        with suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(told.set)

    future.add_done_callback(tell)
    await told.wait()
    return future.result()


# -- A reward is a plain function that names what it wants to know -----------------------------------------------------
# @reward
# def exact(answer, final_answer):
# return final_answer.strip() == answer
#
# Parameters, by name:
# answer         the task's answer                    task       the Task
# question       the text of the last user message    episode    the Episode
# final_answer   the last assistant text              any column of the data
# completion     all that the model wrote
#
# and, as other projects call them, where the data have no column of that name:
# prompt         the question                         prediction, final_response    the final answer
# trajectory     all messages, as dicts
#
# The group form sees all attempts at a task together: its first parameter is `episodes`, and it returns a list.
# A reward returns a number, None (not scored), or a dict: key "reward" (or the function's name) is the reward, the
# other keys are extras, which are measured as `NAME/KEY` and never trained on.
#
# Where a pool of workers is given, a reward runs there, for so many seconds at most; then a hang or a crash costs what
# it was to score. Covey's own that are quick and bounded run in this process.

Function = TypeVar("Function", bound=Callable[..., Any])
Columns = dict[str, float | None]

OF_EPISODE = ("completion", "episode", "final_answer")
LARGEST = 1e15  # squares of rewards are summed in float32, which ends at 3e38
FILLED_IN = (*OF_EPISODE, "answer", "question", "task")  # never options
THEIRS = ("final_response", "prediction", "trajectory")  # AgentFly's names; columns and options go before them


class RewardError(EpisodeError):
    """A reward gave no value for an episode. The cause: `reward` (it raised, or its value is no reward),
    `reward_timeout`, `reward_crash`, or what the reward itself calls it."""

    def __init__(self, name: str, task_id: str, why: str, cause: str = "reward") -> None:
        super().__init__(name, task_id, why, cause)  # all of them: an exception is pickled by its arguments
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
    """Mark a function as a reward, and name it if its own name will not do. It stays a plain function.

    `check` is called with each task before training: it raises InputError if the reward cannot score that task, Absent
    if it needs a package that is not here. `gold` is called with each task's answer: the function with which the reward
    itself reads it, which raises ValueError where it cannot."""

    def mark(function: Function) -> Function:
        function.reward_name = name or function.__name__  # type: ignore[attr-defined]
        function.reward_check = check  # type: ignore[attr-defined]
        function.reward_gold = gold  # type: ignore[attr-defined]
        return function

    return mark if fn is None else mark(fn)


def inline(function: Function) -> Function:
    """Mark a reward of Covey's own that is quick and bounded: it needs no process that can be killed."""
    function.reward_inline = True  # type: ignore[attr-defined]
    return function


def reward_name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "reward_name", "") or getattr(function, "__name__", type(function).__name__))


@dataclass(frozen=True)
class RewardFunction:
    """A function, and what its signature asks for."""

    name: str
    call: Callable[..., Any]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool  # it has **kwargs
    groupwise: bool
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments that the settings fill in
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
    def in_worker(self) -> str:
        """What it is called among the functions of the workers."""
        return f"reward:{self.name}"

    def spread(self, arguments: Mapping[str, Any]) -> Any:
        """What a worker calls: arguments of any name fit through."""
        return self.call(**arguments)

    def check(self, task: Task) -> None:
        """Raise if the function asks for something that this task does not have."""
        known = set(self._of_task(task)) | set(() if self.groupwise else (*OF_EPISODE, *THEIRS))
        missing = [name for name in self.required if name not in known]
        if not missing:
            if (own := getattr(self.call, "reward_check", None)) is not None:
                self._checked(own, task)
            if (read := getattr(self.call, "reward_gold", None)) is not None:
                self._read_gold(read, task)
            return
        lines = [f"reward {self.name} asks for `{missing[0]}`, which {task.where} does not have"]
        if self.groupwise and missing[0] in OF_EPISODE:
            lines.append("  fix: a group reward looks at its `episodes`: [e.final_answer for e in episodes]")
        elif guess := nearest(missing[0], task.columns if missing[0] == "answer" else known):
            lines.append(f"  did you mean   {guess}?")
        lines.append(f"  columns of the data: {', '.join(sorted(task.columns)) or 'none'}")
        lines.append(f"  always there: {', '.join(sorted(known & set(FILLED_IN)))}")
        raise InputError("\n".join(lines))

    def _checked(self, own: Callable[[Task], None], task: Task) -> None:
        """A column of another type than the reward reads is told as a mistake of the data."""
        try:
            with no_exit(f"reward {self.name}"):
                own(task)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"{task.where}: reward {self.name} cannot read its columns ({describe_error(error):.400})"
                f"\n  columns of the data: {', '.join(sorted(task.columns)) or 'none'}"
            ) from error

    def _read_gold(self, read: Callable[[Any], Any], task: Task) -> None:
        try:
            read(task.answer)
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{task.where}: reward {self.name} cannot read the answer {task.answer!r:.60} ({error!s:.200})\n"
                "  fix: correct the answer, take the task out, or use another reward (docs/rewards.md)"
            ) from error

    async def score(self, task: Task, episode: Episode) -> Columns:
        theirs = {
            "final_response": episode.final_answer,
            "prediction": episode.final_answer,
            "trajectory": [dict(message) for message in episode.messages],
        }
        given = {**theirs, **self._of_task(task)} | {
            "completion": _completion(task, episode),
            "episode": episode,
            "final_answer": episode.final_answer,
        }
        return self._columns(task, await self._run(task, given))

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> list[Columns | RewardError]:
        """One call for all attempts, which must return one value for each. A value that is no reward costs its own."""
        values = await self._run(task, self._of_task(task), episodes=list(episodes))
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(episodes):
            raise RewardError(
                self.name, task.id, f"a group reward returns a list with one value for each of {len(episodes)} episodes"
            )
        return [self._columns_or_error(task, value) for value in values]

    def _columns_or_error(self, task: Task, value: Any) -> Columns | RewardError:
        try:
            return self._columns(task, value)
        except RewardError as error:
            return error

    def _of_task(self, task: Task) -> dict[str, Any]:
        """What is known without an episode. An answer that is not there must not pass for None."""
        given = {"prompt": _question(task), **task.columns, "task": task, "question": _question(task)}
        return given if task.answer is None else given | {"answer": task.answer}

    async def _run(self, task: Task, given: Mapping[str, Any], **extra: Any) -> Any:
        missing = [name for name in self.required if name not in given]
        if missing:
            raise RewardError(self.name, task.id, f"it asks for `{missing[0]}`, which this task does not have")
        wanted = given if self.takes_all else {n: given[n] for n in (*self.required, *self.optional) if n in given}
        try:
            return await self._call({**extra, **wanted, **self.options})
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

    async def _call(self, arguments: Mapping[str, Any]) -> Any:
        if self.pool is not None:
            return await self.pool.call(self.in_worker, arguments, seconds=self.seconds)
        value = self.call(**arguments)
        return await value if inspect.isawaitable(value) else value

    def _columns(self, task: Task, value: Any) -> Columns:
        if not isinstance(value, Mapping):
            return {self.name: self._number(task, self.name, value)}
        main = "reward" if "reward" in value else self.name
        if main not in value:
            raise RewardError(
                self.name,
                task.id,
                f"the dict it returned has no 'reward' (keys: {', '.join(map(str, value)) or 'none'})",
            )
        extras = {f"{self.name}/{key}": value[key] for key in value if key != main}
        return {column: self._number(task, column, v) for column, v in {self.name: value[main], **extras}.items()}

    def _number(self, task: Task, column: str, value: Any) -> float | None:
        if value is None:
            return None
        if not isinstance(value, Real):
            raise RewardError(self.name, task.id, f"{column} must be a number or None, got {value!r:.50}")
        try:
            number = float(value)
        except OverflowError:  # an integer that no float holds
            number = math.inf
        if not math.isfinite(number):
            raise RewardError(self.name, task.id, f"{column} is {number}, a reward must be finite")
        if abs(number) > LARGEST:
            raise RewardError(self.name, task.id, f"{column} is {number:g}, a reward must lie within ±{LARGEST:g}")
        return number


def check_options(reward: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in options:
        if key not in known and not known:
            raise InputError(f"reward.options.{reward}.{key}: the reward {reward} has no options")
        if key not in known:
            raise unknown(f"option of reward {reward}", key, known)


def _question(task: Task) -> str:
    return next((str(message["content"]) for message in reversed(task.messages) if message["role"] == "user"), "")


def _completion(task: Task, episode: Episode) -> str:
    """All assistant texts of the attempt. The task's own messages may hold worked examples, which do not count."""
    written = episode.messages[len(task.messages) :]
    return "\n".join(str(message["content"]) for message in written if message["role"] == "assistant")
