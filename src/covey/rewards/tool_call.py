"""Rewards for tool calls: `tool_call` for calls that were executed, `rlla` for calls written in ToolRL's format.

`rlla` is Qian et al. 2025, https://arxiv.org/abs/2504.13958:

    R = R_format + R_correct                            R_format ∈ {0, 1}, R_correct ∈ [−3, 3]
    R_correct = 6 · S / S_max − 3                       S_max = 1 + |G| + Σ_j |keys(G_j)|
    S = |N_G ∩ N_P| / |N_G ∪ N_P|                       names of the tools, with their multiplicity
      + Σ_j |keys(G_j) ∩ keys(P_j)| / |keys(G_j) ∪ keys(P_j)|
      + Σ_j Σ_k [G_j[k] = P_j[k]]

G are the gold calls in order; P_j is the best unused call of the same tool as G_j. The format is correct if the reply
has exactly the parts of the gold answer, in the order <think>, <tool_call>, <response>.

Where the paper gives no rule, we follow its published code: R_correct = 0 if the gold answer makes no call; unreadable
calls earn −3; each call is on its own line.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from covey.errors import InputError
from covey.rewards.function import inline, reward
from covey.types import Episode, Task

# -- tool_call ---------------------------------------------------------------------------------------------------------

Call = tuple[str, Any]
Item = TypeVar("Item")


def _check(task: Task) -> None:
    try:
        _gold(task.columns.get("tool_calls") or [])
    except ValueError as error:
        raise InputError(
            f"{task.where}: {error}\n"
            '  fix: column tool_calls is a list of {"name": ..., "arguments": {...}}; [] where no tool should be called'
        ) from error


@inline
@reward(check=_check)
def tool_call(
    episode: Episode,
    tool_calls: Sequence[Mapping[str, Any]] | None = None,
    ignore: Sequence[str] = ("answer",),
    partial: bool = False,
) -> dict[str, float]:
    """1 if a tool was called and every call was well-formed and succeeded.

    With a column `tool_calls` (a list of {name, arguments}) the calls must also be those, in any order; an empty list
    requires that no tool is called. `partial` pays the correct share instead, where malformed calls count as wrong.
    Tools in `ignore` do not count unless the column lists them. Extras: calls, errors, and with the column matched.
    """
    gold = None if tool_calls is None else _gold(tool_calls)
    ignored = set(ignore) - {name for name, _ in gold or ()}
    used = [use for use in episode.tools if use.tool not in ignored]
    errors = sum(use.error is not None for use in used)
    counts = {"calls": float(len(used)), "errors": float(errors)}
    if gold is None:
        return {"reward": float(bool(used) and errors == 0), **counts}
    made = [call for call in made_calls(episode) if call[0] not in ignored]
    total = max(len(gold), len(made), len(used))
    matched = count_matches(gold, made, _same) / total if total else 1.0
    score = matched if partial else float(matched == 1 and errors == 0)
    return {"reward": score, **counts, "matched": matched}


def made_calls(episode: Episode) -> list[Call]:
    """The calls that the agent ran; if it recorded none, those in the assistant's messages, as of a program behind the
    gateway. An unreadable call has the arguments None."""
    if episode.tools:
        return [(use.tool, use.arguments) for use in episode.tools]
    calls: list[Call] = []
    for message in episode.messages[len(episode.task.messages) :]:
        if message["role"] == "assistant":
            for call in message.get("tool_calls") or ():
                try:
                    calls.append(_call(call))
                except ValueError:
                    calls.append(("", None))
    return calls


def _gold(column: Any) -> list[Call]:
    if not isinstance(column, Sequence) or isinstance(column, str):
        raise ValueError(f"tool_calls must be a list, got {type(column).__name__}")
    return [_call(call) for call in column]


def _call(call: Any) -> Call:
    """From {name, arguments}, or OpenAI's {function: {name, arguments}}, whose arguments may be JSON text."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise ValueError(f"a tool call needs a name, got {call!r:.80}")
    arguments = inner.get("arguments") or {}
    try:
        return inner["name"], json.loads(arguments) if isinstance(arguments, str) else arguments
    except RecursionError:
        raise ValueError("the arguments of a tool call are nested too deeply") from None


def count_matches(gold: Iterable[Item], made: Sequence[Call], matches: Callable[[Item, Call], bool]) -> int:
    """How many gold calls were made; each made call counts once."""
    unmatched = list(made)
    for one in gold:
        index = next((i for i, call in enumerate(unmatched) if matches(one, call)), None)
        if index is not None:
            del unmatched[index]
    return len(made) - len(unmatched)


def _same(gold: Any, made: Any) -> bool:
    """JSON equality: 2 equals 2.0, true is not 1. Strings are compared without surrounding spaces."""
    if isinstance(gold, bool) or isinstance(made, bool):
        return gold is made
    if isinstance(gold, str) and isinstance(made, str):
        return gold.strip() == made.strip()
    if isinstance(gold, Mapping) and isinstance(made, Mapping):
        return gold.keys() == made.keys() and all(_same(gold[key], made[key]) for key in gold)
    if isinstance(gold, list | tuple) and isinstance(made, list | tuple):
        return len(gold) == len(made) and all(map(_same, gold, made))
    return bool(gold == made)


# -- rlla --------------------------------------------------------------------------------------------------------------

PARTS = {"tool_call": "<tool_call>\n.*?\n</tool_call>", "response": "<response>.*?</response>"}
MAX_CORRECTNESS = 3.0
MAX_LENGTH = 50_000  # characters of calls that are parsed

RllaCall = Mapping[str, Any]


def _check_rlla(task: Task) -> None:
    try:
        gold_calls(str(task.answer))
    except ValueError as error:
        raise InputError(
            f"{task.where}: the answer's <tool_call> cannot be read: {error}\n"
            '  fix: one {"name": ..., "parameters": {...}} on each line between <tool_call> and </tool_call>'
        ) from error


@inline
@reward(check=_check_rlla)
def rlla(answer: str, final_answer: str) -> dict[str, float]:
    """ToolRL's reward, from −3 to 4: 0 or 1 for the format, −3 to 3 for the calls. Extras: format, correctness."""
    reply = final_answer.strip()
    form = float(well_formed(answer, reply))
    gold = gold_calls(answer)
    calls = correctness(gold, reply) if gold is not None else 0.0
    return {"reward": form + calls, "format": form, "correctness": calls}


def well_formed(answer: str, reply: str) -> bool:
    """Whether the reply has exactly the parts of the answer, each once and in order."""
    parts = [name for name in PARTS if f"<{name}>" in answer]
    if any(reply.count(tag) != 1 for name in parts for tag in (f"<{name}>", f"</{name}>")):
        return False
    pattern = "\n".join(["<think>.*?</think>", *(PARTS[name] for name in parts)])
    return re.fullmatch(pattern, reply, re.DOTALL) is not None


def gold_calls(answer: str) -> list[RllaCall] | None:
    """The calls of a gold answer; None if it makes none."""
    return _parse(answer) if "<tool_call>" in answer else None


def correctness(gold: Sequence[RllaCall], reply: str) -> float:
    try:
        made = _parse(reply)
    except ValueError:
        return -MAX_CORRECTNESS
    best = 1.0 + sum(1.0 + len(call["parameters"]) for call in gold)
    return MAX_CORRECTNESS * (2 * _score(gold, made) / best - 1)


def _parse(text: str) -> list[RllaCall]:
    """The calls of the first <tool_call>. Raises ValueError if it is missing or unreadable."""
    _, opened, rest = text.partition("<tool_call>")
    inside, closed, _ = rest.partition("</tool_call>")
    if not opened or not closed or len(inside) > MAX_LENGTH:
        raise ValueError("no <tool_call>…</tool_call>")
    try:
        calls = [json.loads(line) for line in inside.strip().splitlines()]
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise ValueError(f"a call needs a name: {call!r:.50}")
        if not isinstance(call.get("parameters"), Mapping):
            raise ValueError(f"a call needs parameters: {call!r:.50}")
    return calls


def _score(gold: Sequence[RllaCall], made: Sequence[RllaCall]) -> float:
    """S of the module's docstring."""
    unused = list(made)
    total = _overlap([call["name"] for call in gold], [call["name"] for call in made])
    for call in gold:
        scores = [
            (_parameter_score(call["parameters"], other["parameters"]), -i)
            for i, other in enumerate(unused)
            if other["name"] == call["name"]
        ]
        score, index = max(scores, default=(0.0, 0))
        if score > 0:
            total += score
            del unused[-index]
    return total


def _parameter_score(gold: Mapping[str, Any], made: Mapping[str, Any]) -> float:
    return _overlap(gold, made) + sum(key in made and made[key] == value for key, value in gold.items())


def _overlap(gold: Iterable[str], made: Iterable[str]) -> float:
    """Intersection over union, with multiplicity; 1 if both are empty."""
    a, b = Counter(list(made)), Counter(list(gold))  # Counter(mapping) would take the values for counts
    union = (a | b).total()
    return (a & b).total() / union if union else 1.0
