"""The rewards of a run: found by name, scored together, one column each, with weights and conditions.

A condition makes a reward count only if another one is earned, so that brevity is worth nothing in a wrong answer:

    reward.only_if={short: exact}              on the command line, by name; {short: "exact>=0.5"} with a threshold
    covey.only_if(short, exact)                in Python: the same reward, with its condition
    covey.only_if(short, "exact", at_least=0.5)

If the condition fails, the reward is 0; if the other reward is None, so is this one. Conditions use the scores before
any condition is applied, so their order does not matter. `short/only_if` in the scores is 1 if the condition is met.
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

Result = TypeVar("Result")
RewardName = str | Callable[..., Any]

DEFAULT = "exact"  # for tasks without a reward of their own

# -- Conditions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    reward: str
    needed: str
    at_least: float | None = None  # None: more than 0

    def met(self, score: float) -> bool:
        return score > 0 if self.at_least is None else score >= self.at_least


def only_if(reward: Callable[..., Any], needed: str | Callable[..., Any], at_least: float | None = None) -> Any:
    """A copy of the reward with a condition on another reward of the run."""

    @functools.wraps(reward)
    def conditional(*args: Any, **kwargs: Any) -> Any:
        return reward(*args, **kwargs)

    name = needed if isinstance(needed, str) else reward_name(needed)
    conditional.reward_condition = Condition(reward_name(reward), name, at_least)  # type: ignore[attr-defined]
    return conditional


def find_conditions(
    functions: Sequence[Callable[..., Any]], settings: Mapping[str, str], names: Sequence[str]
) -> tuple[Condition, ...]:
    """The conditions attached to functions and those of the settings, which win. Their names must be in `names`."""
    conditions = {c.reward: c for f in functions if (c := getattr(f, "reward_condition", None)) is not None}
    conditions |= {reward: _parse_condition(reward, text) for reward, text in settings.items()}
    for condition in conditions.values():
        for name in (condition.reward, condition.needed):
            if name not in names:
                raise unknown("reward in reward.only_if", name, names)
        if condition.reward == condition.needed:
            raise InputError(f"reward.only_if: {condition.reward} cannot depend on itself")
    return tuple(conditions.values())


def _parse_condition(reward: str, text: str) -> Condition:
    match = re.fullmatch(r"\s*([^\s<>=]+)\s*(?:>=\s*([-+.\deE]+)\s*)?", str(text))
    try:
        if match is not None:
            return Condition(reward, match[1], None if match[2] is None else float(match[2]))
    except ValueError:
        pass
    raise InputError(f"reward.only_if.{reward}={text}: write NAME, or NAME>=NUMBER")


def _apply(conditions: Sequence[Condition], scores: Columns, roles: Sequence[str]) -> Columns:
    """The scores after the conditions, which also hold for a reward's values of single roles. NAME/only_if is whether
    the condition of NAME is met: 1, 0, or None if that is unknown."""
    result = dict(scores)
    for condition in conditions:
        name, needed = condition.reward, scores[condition.needed]
        met = None if needed is None else float(condition.met(needed))
        result[f"{name}/only_if"] = met
        if not met:
            keys = (name, *(f"{name}/{role}" for role in roles))
            result |= {key: met for key in keys if scores.get(key) is not None}
    return result


# -- Finding rewards ---------------------------------------------------------------------------------------------------


def resolve_rewards(
    names: RewardName | Sequence[RewardName],
    task_default: str | None,
    weights: Mapping[str, float],
    only_if: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    sandbox: Callable[[], Any] | None = None,
) -> RewardSet:
    """The rewards called `names`: built-in, `module:function`, `file.py:function`, a function itself, or `auto`, the
    task's own. `options` are their arguments, by reward name; a class is instantiated with its options. A reward with a
    parameter `sandbox` gets what `sandbox()` returns."""
    names = [names] if isinstance(names, str) or callable(names) else names
    if not isinstance(names, Sequence) or not all(isinstance(name, str) or callable(name) for name in names):
        raise InputError(f"a reward must be a name, a function or a list of these, got {names!r:.80}")
    if not names:
        raise InputError("reward.name is empty\n  fix: name a reward, or leave it at auto")
    rewards = [_find(name, task_default or DEFAULT) for name in names]
    columns = list(map(reward_name, rewards))
    for column in columns:
        if columns.count(column) > 1:
            raise InputError(
                f"two rewards are called {column}\n  fix: name it once, or rename one with @covey.reward(name=...)"
            )
    for name in weights:
        if name not in columns:
            raise unknown("reward in reward.weights", name, columns)
    checked = _check_option_names(options or {}, columns)
    functions = tuple(
        _make(reward, checked.get(name, {}), sandbox) for reward, name in zip(rewards, columns, strict=True)
    )
    conditions = find_conditions(rewards, only_if or {}, columns)
    return RewardSet(functions, {column: float(weights.get(column, 1.0)) for column in columns}, conditions, checked)


def _find(name: RewardName, task_default: str) -> Callable[..., Any]:
    if not isinstance(name, str):
        return name
    name = task_default if name == "auto" else name
    if name in REWARDS:
        return REWARDS[name]
    if ":" in name:
        function = load_function("reward", name)
        if not callable(function):
            raise InputError(f"reward {name} is not a function")
        return function
    if name.endswith(".py"):
        raise InputError(f"reward {name} names no function\n  fix: {name}:FUNCTION")
    raise unknown("reward", name, REWARDS)


def _check_option_names(options: Mapping[str, Any], columns: Sequence[str]) -> dict[str, dict[str, Any]]:
    for name, values in options.items():
        if name not in columns:
            raise unknown("reward in reward.options", name, columns)
        if not isinstance(values, Mapping):
            raise InputError(f"reward.options.{name}={values}: write reward.options.{name}.OPTION=VALUE")
    return {name: dict(values) for name, values in options.items()}


def _make(reward: Callable[..., Any], options: Mapping[str, Any], sandbox: Callable[[], Any] | None) -> RewardFunction:
    if not isinstance(reward, type):
        if sandbox is not None and "sandbox" in inspect.signature(reward).parameters:
            options = {**options, "sandbox": sandbox()}
        return RewardFunction.of(reward, options)
    name, parameters = reward_name(reward), inspect.signature(reward).parameters
    check_options(name, options, list(parameters))
    for option, parameter in parameters.items():
        if option not in options and parameter.default is parameter.empty:
            raise InputError(f"reward {name} needs its option {option}\n  fix: reward.options.{name}.{option}=VALUE")
    with no_exit(f"reward {name}"):
        instance = reward(**options)
    return RewardFunction.of(instance)


# -- Scoring -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardSet:
    """Implements `covey.protocols.Reward`. The scores of an episode have every name of `names`, followed by extras
    (`NAME/KEY`). Extras have no entry in `weights`: they are logged and never trained on."""

    functions: tuple[RewardFunction, ...]
    weights: dict[str, float]
    conditions: tuple[Condition, ...] = ()
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(function.name for function in self.functions)

    @property
    def trained(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if self.weights[name] != 0) or self.names

    @property
    def columns(self) -> frozenset[str]:
        """The names of task columns that a reward may read."""
        names = (name for function in self.functions for name in (*function.required, *function.optional))
        return frozenset(names) - frozenset(FILLED_IN)

    @property
    def groupwise(self) -> bool:
        """Whether a reward compares the attempts of a group, so `group` must score them together."""
        return any(function.groupwise for function in self.functions)

    def check_all(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self.check(task)

    def check(self, task: Task) -> None:
        """Raise InputError if a reward needs something that this task does not have. Call it before training."""
        for function in self.functions:
            function.check(task)

    def verify(self) -> None:
        """Raise InputError if a model or key that a reward needs is missing. Call it before training."""
        self._call_builtin("verify")

    def worker_functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that a worker pool needs to score with these rewards."""
        return {f.worker_name: f.call_with for f in self.functions if not f.inline}

    def in_workers(self, pool: WorkerPool | None, seconds: float) -> RewardSet:
        """The same rewards, run by the pool's workers with a time limit."""
        functions = (f if f.inline else replace(f, pool=pool, seconds=seconds) for f in self.functions)
        return replace(self, functions=tuple(functions))

    def open(self, *, seconds: float, device: str) -> None:
        """Load models. `seconds` is the time limit of a score, `device` the learner's device."""
        self._call_builtin("open", seconds=seconds, device=device)

    def close(self) -> None:
        self._call_builtin("close")

    def _call_builtin(self, method: str, **arguments: Any) -> None:
        """Call a method of the built-in rewards that have it. A user's reward objects live in the workers."""
        for function in self.functions:
            if function.inline and (bound := getattr(function.call, method, None)) is not None:
                bound(**arguments)

    async def __call__(self, task: Task, episode: Episode) -> Columns:
        """Score one episode. A group reward gets a group of one."""
        (scores,) = await self.group(task, [episode])
        if isinstance(scores, EpisodeError):
            raise scores
        return scores

    async def group(self, task: Task, episodes: Sequence[Episode]) -> list[Columns | EpisodeError]:
        """Score the attempts at a task. Failed episodes get None for every reward. If a reward raises on an attempt,
        only that attempt is lost; group rewards then compare the others."""
        results: list[Columns | EpisodeError] = [dict.fromkeys(self.names) for _ in episodes]
        valid = [index for index, episode in enumerate(episodes) if episode.failure is None]
        single = await asyncio.gather(*(self._score(task, episodes[index]) for index in valid))
        scored: dict[int, Columns] = {}
        for index, scores in zip(valid, single, strict=True):
            if isinstance(scores, EpisodeError):
                results[index] = scores
            else:
                scored[index] = scores
        compared = await self._score_group(task, [episodes[index] for index in scored]) if scored else []
        for (index, scores), more in zip(scored.items(), compared, strict=True):
            if isinstance(more, EpisodeError):
                results[index] = more
            else:
                both = scores | more
                ordered = {name: both[name] for name in self.names} | both
                results[index] = _apply(self.conditions, ordered, episodes[index].roles)
        return results

    async def _score(self, task: Task, episode: Episode) -> Columns | EpisodeError:
        """The scores of the rewards that look at one attempt."""
        try:
            return _merged(await _gather([f.score(task, episode) for f in self.functions if not f.groupwise]))
        except EpisodeError as error:
            return error

    async def _score_group(self, task: Task, episodes: Sequence[Episode]) -> list[Columns | EpisodeError]:
        """The scores of the group rewards, per episode; the first error of an episode replaces its scores."""
        lists = await _gather([f.score_group(task, episodes) for f in self.functions if f.groupwise])
        if not lists:
            return [{} for _ in episodes]
        results: list[Columns | EpisodeError] = []
        for values in zip(*lists, strict=True):
            error = next((value for value in values if isinstance(value, RewardError)), None)
            results.append(error or _merged(value for value in values if not isinstance(value, RewardError)))
        return results


def _merged(parts: Iterable[Columns]) -> Columns:
    return {name: value for part in parts for name, value in part.items()}


async def _gather(calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Await all calls, then raise the first error. Cancelling the others would only kill their workers."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]
