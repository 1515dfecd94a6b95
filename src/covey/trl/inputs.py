"""Converts TRL's inputs: datasets to tasks, peft's LoraConfig to settings, and reward functions to rewards.

Rows of a dataset are dicts with a `prompt`, a text or a list of messages; the other columns go to the rewards.

A reward function is f(completions, prompts, completion_ids, **columns) -> list[float | None], also async. Every
argument is a list with one entry per completion. TRL calls it once per batch, Covey once per prompt, in this process.
A string is the id of a reward model or the name of a Covey reward.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from covey.errors import InputError, nearest
from covey.rewards.builtin import REWARDS
from covey.tasks import list_rows
from covey.types import Episode, Task

UNSUPPORTED_ARGUMENTS = ("trainer_state", "log_extra", "log_metric", "environments")
ALWAYS = ("completions", "prompts", "completion_ids")
PARAMETERS = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("episodes", "task")]


# -- Datasets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    tasks: tuple[Task, ...]
    conversational: bool  # prompts and completions are messages, and the chat template is applied


def read_rows(dataset: Any, name: str, *, only_prompts: bool = False) -> Rows:
    """`only_prompts`: TRL's remove_unused_columns."""
    rows = list_rows(dataset, name)
    tasks = tuple(_task(row, number, name, only_prompts) for number, row in enumerate(rows))
    kinds = {isinstance(row["prompt"], str) for row in rows}
    if len(kinds) > 1:
        raise InputError(f"{name} has prompts that are texts and prompts that are messages\n  use one form")
    return Rows(tasks, conversational=kinds == {False})


def _task(row: Any, number: int, name: str, only_prompts: bool) -> Task:
    place = f"{name}[{number}]"
    if not isinstance(row, Mapping):
        raise InputError(f"{place} must be a dict, got {type(row).__name__}")
    if "prompt" not in row:
        guess = nearest("prompt", map(str, row))
        hint = f"\n  did you mean   {guess}?" if guess else ""
        raise InputError(f"{place} has no prompt; its columns: {', '.join(map(str, row)) or 'none'}{hint}")
    for column in ("image", "images"):
        if row.get(column) is not None:
            raise InputError(f"{place} has {column}: covey.trl takes no images\n  use covey.train (docs/vision.md)")
    prompt = row["prompt"]
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else _messages(prompt, place)
    columns = {} if only_prompts else {str(key): value for key, value in row.items() if key != "prompt"}
    return Task(str(number), messages, columns.get("answer"), columns, place)


def _messages(prompt: Any, place: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(prompt, Iterable):
        raise InputError(f"{place}: prompt must be a text or a list of messages, got {type(prompt).__name__}")
    messages = list(prompt)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"{place}: a message of its prompt has no role: {message!r:.80}")
        if not isinstance(message.get("content"), str):
            raise InputError(f"{place}: the content of a message must be text, got {message.get('content')!r:.80}")
    if not messages:
        raise InputError(f"{place}: its prompt has no messages")
    return tuple({key: value for key, value in message.items() if value is not None} for message in messages)


# -- Adapters ----------------------------------------------------------------------------------------------------------

# Fields of LoraConfig that change training, and the only values that Covey's adapters support.
SAME = {
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "init_lora_weights": (True, None),
    "layers_to_transform": (None,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "exclude_modules": (None, []),
    "target_parameters": (None, []),
}


def translate_adapter(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Settings of the section `model`, and warnings. The config is read by its fields, so peft is not imported."""
    if config is None:
        return {}, []
    if not hasattr(config, "r") or not hasattr(config, "lora_alpha"):
        raise InputError(f"peft_config={type(config).__name__} is not supported\n  supported: peft.LoraConfig")
    for name, allowed in SAME.items():
        if getattr(config, name, allowed[0]) not in allowed:
            raise InputError(f"LoraConfig({name}={getattr(config, name)!r}) is not supported\n  leave it out")
    modules, remarks = config.target_modules, []
    if modules is None:
        remarks.append("LoraConfig without target_modules: every linear layer gets an adapter (all-linear)")
    if getattr(config, "lora_dropout", 0):
        remarks.append(f"LoraConfig(lora_dropout={config.lora_dropout}) has no effect: adapters learn without dropout")
    target = "all-linear" if modules is None else modules if isinstance(modules, str) else sorted(modules)
    return {"lora": {"rank": config.r, "alpha": config.lora_alpha, "target_modules": target}}, remarks


# -- Rewards -----------------------------------------------------------------------------------------------------------


@dataclass
class Rewards:
    functions: list[Any] = field(default_factory=list)  # as covey.train takes them
    weights: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def translate_rewards(reward_funcs: Any, weights: Sequence[float] | None, *, conversational: bool) -> Rewards:
    functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    if not functions or functions == [None]:
        raise InputError("reward_funcs is empty\n  give a function, or a list of them")
    if weights is not None and len(weights) != len(functions):
        raise InputError(f"reward_weights has {len(weights)} weights for {len(functions)} reward functions")
    rewards = Rewards()
    for function, weight in zip(functions, weights or [1.0] * len(functions), strict=True):
        name = _name(function, rewards)
        if isinstance(function, str):
            rewards.functions.append(name)
            if name == "reward_model":
                rewards.options[name] = {"model": function, "device": "learner"}
        elif callable(function) and not hasattr(function, "parameters"):
            rewards.functions.append(wrap(function, name, conversational=conversational))
        else:
            raise InputError(
                f"reward_funcs: a loaded {type(function).__name__} is not supported\n"
                "  give its name or folder as a text, or a function that calls it"
            )
        rewards.weights[name] = float(weight)
    return rewards


def _name(function: Any, rewards: Rewards) -> str:
    """A unique name without special characters, for use in settings."""
    if isinstance(function, str):
        name = function if function in REWARDS else "reward_model"
        if name in rewards.weights:
            raise InputError(f"reward_funcs: {function!r}: only one reward model is supported")
        return name
    written = str(getattr(function, "__name__", "") or type(function).__name__)
    name = plain = re.sub(r"\W+", "_", written).strip("_") or "reward"
    number = 2
    while name in rewards.weights:
        name, number = f"{plain}_{number}", number + 1
    return name


def wrap(function: Callable[..., Any], name: str, *, conversational: bool) -> Callable[..., Any]:
    """A Covey group reward that calls a TRL reward function."""
    parameters = _parameters(function, name)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters}

    async def score(episodes: Sequence[Episode], task: Task) -> Any:
        prompt: Any = [dict(message) for message in task.messages] if conversational else task.messages[0]["content"]
        count = len(episodes)
        arguments: dict[str, list[Any]] = {key: [value] * count for key, value in task.columns.items()}
        arguments["prompts"] = [prompt] * count
        arguments["completions"] = [_completion(episode, conversational=conversational) for episode in episodes]
        arguments["completion_ids"] = [list(episode.turns[-1].completion_ids) for episode in episodes]
        values = function(**{key: value for key, value in arguments.items() if takes_all or key in named})
        values = await values if inspect.isawaitable(values) else values
        return [_number(value) for value in values]

    score.__wrapped__ = function  # type: ignore[attr-defined]  # its source is part of the run's fingerprint
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
    """Check that every parameter without a default is a column of the data or an argument of TRL."""
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for parameter in (p.name for p in parameters if p.default is p.empty and p.kind not in several):
        if parameter in UNSUPPORTED_ARGUMENTS:
            raise InputError(f"reward {name} asks for `{parameter}`, which is not supported by covey.trl")
        if parameter not in (*ALWAYS, *task.columns):
            raise InputError(
                f"reward {name} asks for `{parameter}`, which {task.where} does not have\n"
                f"  its columns: {', '.join(sorted(task.columns)) or 'none'}; always available: {', '.join(ALWAYS)}"
            )


def _completion(episode: Episode, *, conversational: bool) -> Any:
    written = [dict(message) for message in episode.messages[len(episode.task.messages) :]]
    if conversational:
        return [{"role": message["role"], "content": message["content"]} for message in written]
    return "".join(str(message["content"]) for message in written)


def _number(value: Any) -> Any:
    """Convert tensors and NumPy numbers to Python numbers, and NaN to None, as TRL does."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and value != value else value
