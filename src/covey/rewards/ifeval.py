"""The reward for following instructions that a program can verify (IFEval).

Zhou et al. 2023, https://arxiv.org/abs/2311.07911. Strict judges the reply as it is. Loose forgives: an instruction is
followed if it is in the reply without its first line, without its last, without both, or without stars, too.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from covey.errors import Absent, InputError, unknown
from covey.rewards.function import reward
from covey.rewards.ifeval_kinds import DETECTING, KINDS
from covey.types import Task

SCORES = ("instruction_strict", "instruction_loose", "prompt_strict", "prompt_loose")
Settings = Mapping[str, Any]


def _check(task: Task) -> None:
    """Every instruction is known, has the settings of its kind, and can be judged here."""
    kinds = list(task.columns["instruction_id_list"])
    settings = _settings(task.id, kinds, task.columns["kwargs"])
    if not kinds:
        raise InputError(f"task {task.id}: instruction_id_list is empty, there is nothing to follow")
    for kind, given in zip(kinds, settings, strict=True):
        if kind not in KINDS:
            raise InputError(f"task {task.id}: {unknown('instruction of IFEval', kind, KINDS)}")
        needed = list(inspect.signature(KINDS[kind]).parameters)[1:]
        if sorted(needed) != sorted(given):
            wanted, found = ", ".join(needed) or "nothing", ", ".join(given) or "nothing"
            raise InputError(f"task {task.id}: kwargs of {kind} must give {wanted}; they give {found}")
    if DETECTING & set(kinds) and importlib.util.find_spec("langdetect") is None:
        (kind, *_) = DETECTING & set(kinds)
        raise Absent(
            f"reward ifeval: task {task.id} asks for a language ({kind}), which the package langdetect detects\n"
            "  fix: pip install 'covey[ifeval]'"
        )


@reward(check=_check)
def ifeval(
    final_answer: str,
    instruction_id_list: Sequence[str],
    kwargs: Sequence[Settings],
    task: Task,
    score: str = "instruction_strict",
) -> dict[str, float]:
    """The share of instructions that the reply follows, strictly. `score` chooses another of the four scores, all of
    which are extras: instruction_strict, instruction_loose (shares), prompt_strict, prompt_loose (all or nothing)."""
    if score not in SCORES:
        raise ValueError(f"ifeval: score is one of {', '.join(SCORES)}, not {score!r}")
    settings = _settings(task.id, instruction_id_list, kwargs)
    pairs = list(zip(instruction_id_list, settings, strict=True))
    strict = [_follows(final_answer, kind, given) for kind, given in pairs]
    variants = forgiving(final_answer)
    loose = [any(_follows(text, kind, given) for text in variants) for kind, given in pairs]
    scores = {
        "instruction_strict": sum(strict) / len(strict),
        "instruction_loose": sum(loose) / len(loose),
        "prompt_strict": float(all(strict)),
        "prompt_loose": float(all(loose)),
    }
    return {"reward": scores[score], **scores}


def forgiving(reply: str) -> list[str]:
    """The reply, and it without its first line, its last, both; and each of these without stars."""
    lines = reply.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return list(dict.fromkeys(text for one in (reply, *cut) for text in (one, one.replace("*", ""))))


def _follows(text: str, kind: str, settings: Settings) -> bool:
    return bool(text.strip()) and bool(KINDS[kind](text, **settings))


def _settings(task_id: str, kinds: Sequence[str], kwargs: Any) -> list[Settings]:
    """Settings that are null belong to other kinds: tables give every row the columns of all."""
    if len(kinds) != len(kwargs):
        raise InputError(f"task {task_id}: {len(kinds)} instructions in instruction_id_list, {len(kwargs)} in kwargs")
    return [{name: value for name, value in (given or {}).items() if value is not None} for given in kwargs]
