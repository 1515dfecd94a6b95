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
from covey.types import Task

PARTS = {"tool_call": "<tool_call>\n.*?\n</tool_call>", "response": "<response>.*?</response>"}
LARGEST = 3.0  # R_correct goes from −LARGEST to LARGEST
LONGEST = 50_000  # characters of calls that are read

Call = Mapping[str, Any]


def _check(task: Task) -> None:
    try:
        gold_calls(str(task.answer))
    except ValueError as error:
        raise InputError(
            f"{task.where}: the answer's <tool_call> cannot be read: {error}\n"
            '  fix: one {"name": ..., "parameters": {...}} on each line between <tool_call> and </tool_call>'
        ) from error


@reward(check=_check)
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


def gold_calls(answer: str) -> list[Call] | None:
    """The calls of a gold answer; None where it makes none."""
    return _read(answer) if "<tool_call>" in answer else None


def correctness(gold: Sequence[Call], reply: str) -> float:
    try:
        made = _read(reply)
    except ValueError:
        return -LARGEST
    best = 1.0 + sum(1.0 + len(call["parameters"]) for call in gold)
    return LARGEST * (2 * _score(gold, made) / best - 1)


def _read(text: str) -> list[Call]:
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


def _score(gold: Sequence[Call], made: Sequence[Call]) -> float:
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
