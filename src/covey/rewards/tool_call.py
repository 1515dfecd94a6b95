"""The reward for calling tools well."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from covey.errors import InputError
from covey.rewards.function import reward
from covey.types import Episode, Task

Call = tuple[str, Any]


def _check(task: Task) -> None:
    try:
        _calls(task.columns.get("tool_calls") or [])
    except ValueError as error:
        raise InputError(
            f"{task.where}: {error}\n"
            '  fix: column tool_calls is a list of {"name": ..., "arguments": {...}}; [] where no tool should be called'
        ) from error


@reward(check=_check)
def tool_call(
    episode: Episode,
    tool_calls: Sequence[Mapping[str, Any]] | None = None,
    ignore: Sequence[str] = ("answer",),
    partial: bool = False,
) -> dict[str, float]:
    """1 if there was a tool call and every one was well-formed and succeeded.

    With a column `tool_calls` (a list of {name, arguments}) the calls must also be those, in any order; an empty list
    asks for no call at all. `partial` then pays the share that was right, and malformed calls count as wrong ones.
    Tools of `ignore` do not count, unless the column lists them. Extras: calls, errors, and with the column matched.
    """
    gold = None if tool_calls is None else _calls(tool_calls)
    skipped = set(ignore) - {name for name, _ in gold or ()}
    used = [use for use in episode.tools if use.tool not in skipped]
    errors = sum(use.error is not None for use in used)
    counts = {"calls": float(len(used)), "errors": float(errors)}
    if gold is None:
        return {"reward": float(bool(used) and errors == 0), **counts}
    made = [call for call in made_calls(episode) if call[0] not in skipped]
    total = max(len(gold), len(made), len(used))
    matched = _matches(gold, made) / total if total else 1.0
    score = matched if partial else float(matched == 1 and errors == 0)
    return {"reward": score, **counts, "matched": matched}


def made_calls(episode: Episode) -> list[Call]:
    """The calls as the messages of the attempt hold them. One that cannot be read has no arguments to compare."""
    found: list[Call] = []
    for message in episode.messages[len(episode.task.messages) :]:
        if message["role"] == "assistant":
            for call in message.get("tool_calls") or ():
                try:
                    found.append(_call(call))
                except ValueError:
                    found.append(("", None))
    return found


def _calls(written: Any) -> list[Call]:
    if not isinstance(written, Sequence) or isinstance(written, str):
        raise ValueError(f"tool_calls must be a list, got {type(written).__name__}")
    return [_call(call) for call in written]


def _call(call: Any) -> Call:
    """From {name, arguments}, or OpenAI's {function: {name, arguments}} whose arguments may be JSON text."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise ValueError(f"a tool call needs a name, got {call!r:.80}")
    arguments = inner.get("arguments") or {}
    try:
        return inner["name"], json.loads(arguments) if isinstance(arguments, str) else arguments
    except RecursionError:
        raise ValueError("the arguments of a tool call are nested too deeply") from None


def _matches(gold: Sequence[Call], made: Sequence[Call]) -> int:
    left = list(made)
    count = 0
    for call in gold:
        place = next((i for i, other in enumerate(left) if _same(call, other)), None)
        if place is not None:
            del left[place]
            count += 1
    return count


def _same(gold: Any, made: Any) -> bool:
    """Equal values; 2 is 2.0 as in JSON, but true is not 1. Strings are compared without spaces around them."""
    if isinstance(gold, bool) or isinstance(made, bool):
        return gold is made
    if isinstance(gold, str) and isinstance(made, str):
        return gold.strip() == made.strip()
    if isinstance(gold, Mapping) and isinstance(made, Mapping):
        return gold.keys() == made.keys() and all(_same(gold[key], made[key]) for key in gold)
    if isinstance(gold, list | tuple) and isinstance(made, list | tuple):
        return len(gold) == len(made) and all(map(_same, gold, made))
    return bool(gold == made)
