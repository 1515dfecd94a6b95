"""Rewards that count only if another one is earned: brevity is worth nothing in a wrong answer.

    reward.only_if={short: exact}              on the command line, by name; {short: "exact>=0.5"} with a bar
    covey.only_if(short, exact)                in Python: the same reward, with its condition
    covey.only_if(short, "exact", at_least=0.5)

Where the condition fails the reward is 0; where the other reward was never given, so is this one (None). Conditions
look at the scores as they were given, so their order does not matter.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from covey.errors import EpisodeError, InputError, unknown
from covey.imports import load_function, no_exit
from covey.rewards.builtin import REWARDS
from covey.rewards.function import FILLED_IN, Columns, RewardError, RewardFunction, check_options, reward_name
from covey.types import Episode, Task
from covey.workers import WorkerPool


@dataclass(frozen=True)
class Condition:
    reward: str
    needed: str
    at_least: float | None = None  # None: more than 0

    def met(self, score: float) -> bool:
        return score > 0 if self.at_least is None else score >= self.at_least


def only_if(reward: Callable[..., Any], needed: str | Callable[..., Any], at_least: float | None = None) -> Any:
    """The reward, with a condition on another reward of the run. `reward` itself stays as it is."""

    @functools.wraps(reward)
    def conditional(*args: Any, **kwargs: Any) -> Any:
        return reward(*args, **kwargs)

    name = needed if isinstance(needed, str) else reward_name(needed)
    conditional.reward_condition = Condition(reward_name(reward), name, at_least)  # type: ignore[attr-defined]
    return conditional


def find_conditions(
    functions: Sequence[Callable[..., Any]], written: Mapping[str, str], names: Sequence[str]
) -> tuple[Condition, ...]:
    """Those that came with the functions and those of the settings (which win), checked against the rewards' names."""
    found = {c.reward: c for f in functions if (c := getattr(f, "reward_condition", None)) is not None}
    found |= {reward: _parse(reward, text) for reward, text in written.items()}
    for condition in found.values():
        for name in (condition.reward, condition.needed):
            if name not in names:
                raise unknown("reward in reward.only_if", name, names)
        if condition.reward == condition.needed:
            raise InputError(f"reward.only_if: {condition.reward} cannot depend on itself")
    return tuple(found.values())


def _parse(reward: str, text: str) -> Condition:
    match = re.fullmatch(r"\s*([^\s<>=]+)\s*(?:>=\s*([-+.\deE]+)\s*)?", str(text))
    try:
        bar = None if match is None or match[2] is None else float(match[2])
    except ValueError:
        match = None
    if match is None:
        raise InputError(f"reward.only_if.{reward}={text}: write NAME, or NAME>=NUMBER")
    return Condition(reward, match[1], bar)


def apply(conditions: Sequence[Condition], scores: Columns) -> Columns:
    changed = dict(scores)
    for condition in conditions:
        needed, own = scores[condition.needed], scores[condition.reward]
        if needed is None or own is None:
            changed[condition.reward] = None
        elif not condition.met(needed):
            changed[condition.reward] = 0.0
    return changed


# -- The rewards of a run: found by name, called together, one column each ---------------------------------------------

Result = TypeVar("Result")
RewardName = str | Callable[..., Any]

DEFAULT = "exact"  # for tasks that bring no reward of their own


def resolve_rewards(
    names: RewardName | Sequence[RewardName],
    task_default: str | None,
    weights: Mapping[str, float],
    only_if: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    sandbox: Callable[[], Any] | None = None,
) -> RewardSet:
    """The rewards called `names`: built-in, `module:function`, `file.py:function`, a function itself, or `auto`, the
    task's own. `options` are arguments of theirs, by name; a class is a reward once it is made with its options. A
    reward with a parameter `sandbox` is given what `sandbox` makes."""
    wanted = [names] if isinstance(names, str) or callable(names) else list(names)
    if not wanted:
        raise InputError("reward.name is empty\n  fix: name a reward, or leave it at auto")
    found = [_find(name, task_default or DEFAULT) for name in wanted]
    columns = list(map(reward_name, found))
    for column in columns:
        if columns.count(column) > 1:
            raise InputError(
                f"two rewards are called {column}\n  fix: name it once, or rename one with @covey.reward(name=...)"
            )
    for name in weights:
        if name not in columns:
            raise unknown("reward in reward.weights", name, columns)
    given = _options(options or {}, columns)
    functions = tuple(
        _make(function, given.get(name, {}), sandbox) for function, name in zip(found, columns, strict=True)
    )
    conditions = find_conditions(found, only_if or {}, columns)
    return RewardSet(functions, {column: float(weights.get(column, 1.0)) for column in columns}, conditions, given)


def _options(options: Mapping[str, Any], columns: Sequence[str]) -> dict[str, dict[str, Any]]:
    for name, given in options.items():
        if name not in columns:
            raise unknown("reward in reward.options", name, columns)
        if not isinstance(given, Mapping):
            raise InputError(f"reward.options.{name}={given}: write reward.options.{name}.OPTION=VALUE")
    return {name: dict(given) for name, given in options.items()}


def _make(found: Callable[..., Any], options: Mapping[str, Any], sandbox: Callable[[], Any] | None) -> RewardFunction:
    if not isinstance(found, type):
        if sandbox is not None and "sandbox" in inspect.signature(found).parameters:
            options = {**options, "sandbox": sandbox()}
        return RewardFunction.of(found, options)
    name, parameters = reward_name(found), inspect.signature(found).parameters
    check_options(name, options, list(parameters))
    for option, parameter in parameters.items():
        if option not in options and parameter.default is parameter.empty:
            raise InputError(f"reward {name} needs to know its {option}\n  fix: reward.options.{name}.{option}=VALUE")
    with no_exit(f"reward {name}"):
        made = found(**options)
    return RewardFunction.of(made)


def _find(name: RewardName, task_default: str) -> Callable[..., Any]:
    if not isinstance(name, str):
        return name
    name = task_default if name == "auto" else name
    if name in REWARDS:
        return REWARDS[name]
    if ":" in name:
        found = load_function("reward", name)
        if not callable(found):
            raise InputError(f"reward {name} is not a function")
        return found
    if name.endswith(".py"):
        raise InputError(f"reward {name} names no function\n  fix: {name}:FUNCTION")
    raise unknown("reward", name, REWARDS)


@dataclass(frozen=True)
class RewardSet:
    """Implements `covey.protocols.Reward`. The table of an episode holds every name of `names`, and extras
    (`NAME/KEY`) after them; `weights` has no entry for an extra: it is measured and never trained on."""

    functions: tuple[RewardFunction, ...]
    weights: dict[str, float]
    conditions: tuple[Condition, ...] = ()
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(function.name for function in self.functions)

    @property
    def columns(self) -> frozenset[str]:
        """Columns of a task that a reward asks for by name, as far as the task has them."""
        asked = (name for function in self.functions for name in (*function.required, *function.optional))
        return frozenset(asked) - frozenset(FILLED_IN)

    @property
    def groupwise(self) -> bool:
        """True if some reward compares the attempts of a group, so that `group` must score them together."""
        return any(function.groupwise for function in self.functions)

    def check(self, task: Task) -> None:
        """Raise `InputError` if a reward asks for what this task does not have. Call it before training."""
        for function in self.functions:
            function.check(task)

    def check_all(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self.check(task)

    def verify(self) -> None:
        """Raise `InputError` if what a reward stands on, a model or a key, is not there. Call it before training."""
        self._tell("verify")

    def for_workers(self) -> dict[str, Callable[..., Any]]:
        """The functions that a pool must have to score with these rewards."""
        return {f.in_worker: f.spread for f in self.functions if not f.inline}

    def within(self, pool: WorkerPool | None, seconds: float) -> RewardSet:
        """The same rewards, called by the pool's workers, for so many seconds at most."""
        inside = (f if f.inline else replace(f, pool=pool, seconds=seconds) for f in self.functions)
        return replace(self, functions=tuple(inside))

    def open(self, *, seconds: float, device: str) -> None:
        """Load what takes long. `seconds` is how long a score may take, `device` where the learner works."""
        self._tell("open", seconds=seconds, device=device)

    def close(self) -> None:
        self._tell("close")

    def _tell(self, what: str, **arguments: Any) -> None:
        """To Covey's own that are objects: those of the user's live in the workers."""
        for function in self.functions:
            if function.inline and (method := getattr(function.call, what, None)) is not None:
                method(**arguments)

    async def __call__(self, task: Task, episode: Episode) -> Columns:
        """Score one episode. A group reward sees a group of one."""
        (table,) = await self.group(task, [episode])
        if isinstance(table, EpisodeError):
            raise table
        return table

    async def group(self, task: Task, episodes: Sequence[Episode]) -> list[Columns | EpisodeError]:
        """Score the attempts at a task. One that failed is not scored: None throughout. A reward that raises on one
        attempt costs that one; one that compares them is given the others."""
        valid = [episode for episode in episodes if episode.failure is None]
        alone = await asyncio.gather(*(self._alone(task, episode) for episode in valid))
        left = [(e, table) for e, table in zip(valid, alone, strict=True) if not isinstance(table, EpisodeError)]
        compared = await self._compared(task, [e for e, _ in left]) if left else []
        pairs = zip(left, compared, strict=True)
        found = iter([more if isinstance(more, EpisodeError) else self._table(t | more) for (_, t), more in pairs])
        tables = iter([table if isinstance(table, EpisodeError) else next(found) for table in alone])
        unscored: Columns = dict.fromkeys(self.names)
        return [next(tables) if episode.failure is None else dict(unscored) for episode in episodes]

    async def _alone(self, task: Task, episode: Episode) -> Columns | EpisodeError:
        """What the rewards say that look at one attempt."""
        try:
            tables = await _together([f.score(task, episode) for f in self.functions if not f.groupwise])
        except EpisodeError as error:
            return error
        return _merged(tables)

    async def _compared(self, task: Task, episodes: Sequence[Episode]) -> list[Columns | EpisodeError]:
        """What the rewards say that compare attempts, for each."""
        lists = await _together([f.score_group(task, episodes) for f in self.functions if f.groupwise])
        return [_merged_or_error(tables) for tables in zip(*lists, strict=True)] if lists else [{} for _ in episodes]

    def _table(self, merged: Columns) -> Columns:
        extras = {name: value for name, value in merged.items() if name not in self.weights}
        return apply(self.conditions, {name: merged[name] for name in self.names}) | extras


def _merged_or_error(tables: Sequence[Columns | RewardError]) -> Columns | EpisodeError:
    """Of one attempt: the first error, if any reward has one."""
    errors = [table for table in tables if isinstance(table, RewardError)]
    return errors[0] if errors else _merged(table for table in tables if not isinstance(table, RewardError))


def _merged(tables: Iterable[Columns]) -> Columns:
    return {name: value for table in tables for name, value in table.items()}


async def _together(calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Await all at once. If some raise, the others are not cancelled, which would kill their workers for nothing."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for value in found:
        if isinstance(value, BaseException):
            raise value
    return found  # type: ignore[return-value]
