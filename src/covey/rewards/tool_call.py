"""The reward for tool calls in the form of ToolRL: a part for the form of the reply, a part for its calls.

Qian et al. 2025, https://arxiv.org/abs/2504.13958

    R = R_format + R_correct                            R_format ∈ {0, 1}, R_correct ∈ [−3, 3]
    R_correct = 6 · S / S_max − 3                       S_max = 1 + |G| + Σ_j |keys(G_j)|
    S = |N_G ∩ N_P| / |N_G ∪ N_P|                       names of the tools, with their multiplicity
      + Σ_j |keys(G_j) ∩ keys(P_j)| / |keys(G_j) ∪ keys(P_j)|
      + Σ_j Σ_k [G_j[k] = P_j[k]]

G are the gold calls in order, P_j is the call of the same tool that fits G_j best and is not yet taken. The form is
right if the reply has exactly the parts of the gold answer, in the order <think>, <tool_call>, <response>.

Where the paper is silent we do as its public program does: a reply to a question whose gold answer makes no call has
R_correct = 0 whatever it says; calls that cannot be read earn −3; each call stands on a line of its own.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from covey.errors import InputError
from covey.rewards.function import reward
from covey.types import Episode, Task

PARTS = {"tool_call": "<tool_call>\n.*?\n</tool_call>", "response": "<response>.*?</response>"}
LARGEST = 3.0  # R_correct goes from −LARGEST to LARGEST
LONGEST = 50_000  # characters of calls that are read

RllaCall = Mapping[str, Any]


def _check_rlla(task: Task) -> None:
    try:
        gold_calls(str(task.answer))
    except ValueError as error:
        raise InputError(
            f"{task.where}: the answer's <tool_call> cannot be read: {error}\n"
            '  fix: one {"name": ..., "parameters": {...}} on each line between <tool_call> and </tool_call>'
        ) from error


@reward(check=_check_rlla)
def rlla(answer: str, final_answer: str) -> dict[str, float]:
    """ToolRL's reward, from −3 to 4: 0 or 1 for the form, −3 to 3 for the calls. Extras: format, correctness."""
    reply = final_answer.strip()
    form = float(well_formed(answer, reply))
    gold = gold_calls(answer)
    right = correctness(gold, reply) if gold is not None else 0.0
    return {"reward": form + right, "format": form, "correctness": right}


def well_formed(answer: str, reply: str) -> bool:
    """Exactly the parts that the answer has, each once, one below the other."""
    wanted = [name for name in PARTS if f"<{name}>" in answer]
    if any(reply.count(mark) != 1 for name in wanted for mark in (f"<{name}>", f"</{name}>")):
        return False
    return (
        re.fullmatch("\n".join(["<think>.*?</think>", *(PARTS[name] for name in wanted)]), reply, re.DOTALL) is not None
    )


def gold_calls(answer: str) -> list[RllaCall] | None:
    """The calls of a gold answer; None where it makes none."""
    return _read(answer) if "<tool_call>" in answer else None


def correctness(gold: Sequence[RllaCall], reply: str) -> float:
    try:
        made = _read(reply)
    except ValueError:
        return -LARGEST
    best = 1.0 + sum(1.0 + len(call["parameters"]) for call in gold)
    return LARGEST * (2 * _score(gold, made) / best - 1)


def _read(text: str) -> list[RllaCall]:
    """The calls of the first <tool_call>. ValueError: there is none, or one that cannot be read."""
    _, found, rest = text.partition("<tool_call>")
    inside, closed, _ = rest.partition("</tool_call>")
    if not found or not closed or len(inside) > LONGEST:
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
    left = list(made)
    total = _overlap([call["name"] for call in gold], [call["name"] for call in made])
    for call in gold:
        fits = [
            (_fit(call["parameters"], other["parameters"]), -i)
            for i, other in enumerate(left)
            if other["name"] == call["name"]
        ]
        if fits and max(fits)[0] > 0:
            fit, place = max(fits)
            total += fit
            del left[-place]
    return total


def _fit(gold: Mapping[str, Any], made: Mapping[str, Any]) -> float:
    return _overlap(gold, made) + sum(key in made and made[key] == value for key, value in gold.items())


def _overlap(gold: Iterable[str], made: Iterable[str]) -> float:
    """Size of the intersection over that of the union, with multiplicity; 1 for two empty ones."""
    ours, theirs = Counter(list(made)), Counter(list(gold))  # a mapping would be taken for counts
    union = (ours | theirs).total()
    return (ours & theirs).total() / union if union else 1.0


# -- The reward for calling tools well ---------------------------------------------------------------------------------

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
