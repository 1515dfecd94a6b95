"""TRL's reward functions → Covey's.

    f(completions, prompts, completion_ids, **columns) -> list[float | None]          also async

Every argument is a list with one entry per completion. TRL calls a function once per batch; Covey calls it once per
prompt, with the completions of that prompt, in this process. A text is the id of a reward model, or one of Covey's
rewards by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from covey.errors import InputError
from covey.rewards.builtin import REWARDS
from covey.types import Episode, Task

NOT_GIVEN = ("trainer_state", "log_extra", "log_metric", "environments")
ALWAYS = ("completions", "prompts", "completion_ids")
PARAMETERS = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("episodes", "task")]


@dataclass
class Rewards:
    functions: list[Any] = field(default_factory=list)  # as covey.train takes them
    weights: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def translate_rewards(reward_funcs: Any, weights: Sequence[float] | None, *, conversational: bool) -> Rewards:
    given = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    if not given or given == [None]:
        raise InputError("reward_funcs is empty\n  give a function, or a list of them")
    if weights is not None and len(weights) != len(given):
        raise InputError(f"reward_weights has {len(weights)} weights for {len(given)} reward functions")
    found = Rewards()
    for function, weight in zip(given, weights or [1.0] * len(given), strict=True):
        name = _name(function, found)
        if isinstance(function, str):
            found.functions.append(name)
            if name == "reward_model":
                found.options[name] = {"model": function, "device": "learner"}
        elif callable(function) and not hasattr(function, "parameters"):
            found.functions.append(wrap(function, name, conversational=conversational))
        else:
            raise InputError(
                f"reward_funcs: a loaded {type(function).__name__} is not supported\n"
                "  give its name or folder as a text, or a function that calls it"
            )
        found.weights[name] = float(weight)
    return found


def _name(function: Any, found: Rewards) -> str:
    """Words of Covey's settings: no signs, and each once."""
    if isinstance(function, str):
        name = function if function in REWARDS else "reward_model"
        if name in found.weights:
            raise InputError(f"reward_funcs: {function!r} is one reward model too many; one is supported")
        return name
    written = str(getattr(function, "__name__", "") or type(function).__name__)
    name = plain = re.sub(r"\W+", "_", written).strip("_") or "reward"
    number = 2
    while name in found.weights:
        name, number = f"{plain}_{number}", number + 1
    return name


def wrap(function: Callable[..., Any], name: str, *, conversational: bool) -> Callable[..., Any]:
    """A group reward of Covey's that calls a function of TRL's form."""

    parameters = _parameters(function, name)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters}

    async def score(episodes: Sequence[Episode], task: Task) -> Any:
        prompt: Any = [dict(message) for message in task.messages] if conversational else task.messages[0]["content"]
        count = len(episodes)
        given: dict[str, list[Any]] = {key: [value] * count for key, value in task.columns.items()}
        given["prompts"] = [prompt] * count
        given["completions"] = [_completion(episode, conversational=conversational) for episode in episodes]
        given["completion_ids"] = [list(episode.turns[-1].completion_ids) for episode in episodes]
        values = function(**{key: value for key, value in given.items() if takes_all or key in named})
        values = await values if inspect.isawaitable(values) else values
        return [_number(value) for value in values]

    score.__wrapped__ = function  # type: ignore[attr-defined]  # its source is what the run is recognised by
    score.__signature__ = inspect.Signature(PARAMETERS)  # type: ignore[attr-defined]
    score.reward_name = name  # type: ignore[attr-defined]
    score.reward_inline = True  # type: ignore[attr-defined]  # as in TRL: it may hold a model, or remember calls
    score.reward_check = lambda task: _check(name, parameters, task)  # type: ignore[attr-defined]
    return score


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise InputError(f"reward {name}: its parameters cannot be read ({error})") from error


def _check(name: str, parameters: Sequence[inspect.Parameter], task: Task) -> None:
    """Every parameter without a default must be a column of the data, or one that TRL fills in."""
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for parameter in (p.name for p in parameters if p.default is p.empty and p.kind not in several):
        if parameter in NOT_GIVEN:
            raise InputError(f"reward {name} asks for `{parameter}`, which is not supported by covey.trl")
        if parameter not in (*ALWAYS, *task.columns):
            raise InputError(
                f"reward {name} asks for `{parameter}`, which {task.where} does not have\n"
                f"  its columns: {', '.join(sorted(task.columns)) or 'none'}; always there: {', '.join(ALWAYS)}"
            )


def _completion(episode: Episode, *, conversational: bool) -> Any:
    written = [dict(message) for message in episode.messages[len(episode.task.messages) :]]
    if conversational:
        return [{"role": message["role"], "content": message["content"]} for message in written]
    return "".join(str(message["content"]) for message in written)


def _number(value: Any) -> Any:
    """Tensors and numpy's numbers become Python's; NaN is how TRL itself writes None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and value != value else value
