"""The reward for following instructions that a program can verify (IFEval).

Zhou et al. 2023, https://arxiv.org/abs/2311.07911. Strict judges the reply as it is. Loose forgives: an instruction is
followed if it is in the reply without its first line, without its last, without both, or without stars, too.

`ifeval_composite` is TorchRL's reward for training on it, which pays for form besides, from 0 to 2.2:

    0.4·prompt_strict + 0.3·instruction_strict + 0.2·prompt_loose + 0.1·instruction_loose
      + 0.5·[one <think>…</think>] + 0.5·[one <answer>…</answer>] + 0.2·[the model ended the reply itself]

Only what stands in the first <answer>…</answer> is judged; a reply without one follows nothing.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from covey.errors import Absent, InputError, unknown
from covey.install import install_extra
from covey.rewards.function import reward
from covey.rewards.ifeval_kinds import DETECTING, KINDS
from covey.types import Episode, StopReason, Task

SCORES = ("instruction_strict", "instruction_loose", "prompt_strict", "prompt_loose")
WEIGHTED = ("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose")
Settings = Mapping[str, Any]


def _check(task: Task) -> None:
    """Every instruction is known, has the settings of its kind, and can be judged here."""
    kinds = list(task.columns["instruction_id_list"])
    settings = _settings(task.id, kinds, task.columns["kwargs"])
    if not kinds:
        raise InputError(f"{task.where}: instruction_id_list is empty, there is nothing to follow")
    for kind, given in zip(kinds, settings, strict=True):
        if kind not in KINDS:
            raise InputError(f"{task.where}: {unknown('instruction of IFEval', kind, KINDS)}")
        needed = list(inspect.signature(KINDS[kind]).parameters)[1:]
        if sorted(needed) != sorted(given):
            wanted, found = ", ".join(needed) or "nothing", ", ".join(given) or "nothing"
            raise InputError(f"{task.where}: kwargs of {kind} must give {wanted}; they give {found}")
    if DETECTING & set(kinds) and importlib.util.find_spec("langdetect") is None:
        (kind, *_) = DETECTING & set(kinds)
        raise Absent(
            f"reward ifeval: {task.where} asks for a language ({kind}), which the package langdetect detects\n"
            f"  fix: {install_extra('ifeval')}"
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
    scores = four_scores(final_answer, instruction_id_list, _settings(task.id, instruction_id_list, kwargs))
    return {"reward": scores[score], **scores}


@reward(check=_check)
def ifeval_composite(
    final_answer: str,
    episode: Episode,
    instruction_id_list: Sequence[str],
    kwargs: Sequence[Settings],
    task: Task,
    weights: Sequence[float] = (0.4, 0.3, 0.2, 0.1),
) -> dict[str, float]:
    """TorchRL's training reward, from 0 to 2.2: the four scores of the text in <answer>, weighted (`weights`: prompt
    strict, instruction strict, prompt loose, instruction loose), 0.5 each for one <think> and one <answer>, and 0.2
    for a reply that the model itself ended. Extras: the four scores, structure, complete."""
    if len(weights) != len(WEIGHTED):
        raise ValueError(f"ifeval_composite: weights are {len(WEIGHTED)} numbers, for {', '.join(WEIGHTED)}")
    thoughts, answers = (_inside(final_answer, tag) for tag in ("think", "answer"))
    judged = answers[0] if answers else ""
    scores = four_scores(judged, instruction_id_list, _settings(task.id, instruction_id_list, kwargs))
    followed = sum(weight * scores[name] for weight, name in zip(weights, WEIGHTED, strict=True))
    structure = 0.5 * (len(thoughts) == 1) + 0.5 * (len(answers) == 1)
    complete = float(bool(episode.turns) and episode.turns[-1].stop == StopReason.EOS)
    return {"reward": followed + structure + 0.2 * complete, **scores, "structure": structure, "complete": complete}


def _inside(text: str, tag: str) -> list[str]:
    """What stands between each <tag> and the next </tag>. One that is never closed ends the search."""
    found, at = [], 0
    while (start := text.find(f"<{tag}>", at)) >= 0 and (end := text.find(f"</{tag}>", start)) >= 0:
        found.append(text[start + len(tag) + 2 : end])
        at = end + len(tag) + 3
    return found


def four_scores(text: str, kinds: Sequence[str], settings: Sequence[Settings]) -> dict[str, float]:
    pairs = list(zip(kinds, settings, strict=True))
    strict = [_follows(text, kind, given) for kind, given in pairs]
    variants = forgiving(text)
    loose = [any(_follows(one, kind, given) for one in variants) for kind, given in pairs]
    return {
        "instruction_strict": sum(strict) / len(strict),
        "instruction_loose": sum(loose) / len(loose),
        "prompt_strict": float(all(strict)),
        "prompt_loose": float(all(loose)),
    }


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
