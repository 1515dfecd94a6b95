"""The rewards of a run: found by name, called together, one column each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from covey.errors import InputError, unknown
from covey.plugins import load_function
from covey.rewards.builtin import REWARDS
from covey.rewards.condition import Condition, apply, find_conditions
from covey.rewards.function import Columns, RewardFunction
from covey.types import Episode, Task

Result = TypeVar("Result")
RewardName = str | Callable[..., Any]

DEFAULT = "exact"  # for tasks that bring no reward of their own


def resolve_rewards(
    names: RewardName | Sequence[RewardName],
    task_default: str | None,
    weights: Mapping[str, float],
    only_if: Mapping[str, str] | None = None,
) -> RewardSet:
    """The rewards called `names`: built-in, `module:function`, `file.py:function`, a function itself, or `auto`, the
    task's own."""
    wanted = [names] if isinstance(names, str) or callable(names) else list(names)
    if not wanted:
        raise InputError("reward.name is empty\n  fix: name a reward, or leave it at auto")
    found = [_find(name, task_default or DEFAULT) for name in wanted]
    functions = tuple(map(RewardFunction.of, found))
    columns = [function.name for function in functions]
    for column in columns:
        if columns.count(column) > 1:
            raise InputError(
                f"two rewards are called {column}\n  fix: name it once, or rename one with @covey.reward(name=...)"
            )
    for name in weights:
        if name not in columns:
            raise unknown("reward in reward.weights", name, columns)
    conditions = find_conditions(found, only_if or {}, columns)
    return RewardSet(functions, {column: float(weights.get(column, 1.0)) for column in columns}, conditions)


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

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(function.name for function in self.functions)

    @property
    def groupwise(self) -> bool:
        """True if some reward compares the attempts of a group, so that `group` must score them together."""
        return any(function.groupwise for function in self.functions)

    def check(self, task: Task) -> None:
        """Raise `InputError` if a reward asks for what this task does not have. Call it before training."""
        for function in self.functions:
            function.check(task)

    async def __call__(self, task: Task, episode: Episode) -> Columns:
        """Score one episode. A group reward sees a group of one."""
        return (await self.group(task, [episode]))[0]

    async def group(self, task: Task, episodes: Sequence[Episode]) -> list[Columns]:
        """Score the attempts at a task. One that failed is not scored: None throughout."""
        valid = [episode for episode in episodes if episode.failure is None]
        tables = iter(await self._score(task, valid) if valid else [])
        unscored: Columns = dict.fromkeys(self.names)
        return [next(tables) if episode.failure is None else dict(unscored) for episode in episodes]

    async def _score(self, task: Task, episodes: Sequence[Episode]) -> list[Columns]:
        per_function = await _together([_score_all(function, task, episodes) for function in self.functions])
        tables: list[Columns] = []
        for columns in zip(*per_function, strict=True):
            merged = {name: value for table in columns for name, value in table.items()}
            extras = {name: value for name, value in merged.items() if name not in self.weights}
            tables.append(apply(self.conditions, {name: merged[name] for name in self.names}) | extras)
        return tables


async def _score_all(function: RewardFunction, task: Task, episodes: Sequence[Episode]) -> list[Columns]:
    if function.groupwise:
        return await function.score_group(task, episodes)
    return await _together([function.score(task, episode) for episode in episodes])


async def _together(calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Await all at once; the first exception cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
        return [task.result() for task in running]
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
    raise first
