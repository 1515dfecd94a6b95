"""Rewards that count only if another one is earned: brevity is worth nothing in a wrong answer.

    reward.only_if={short: exact}              on the command line, by name; {short: "exact>=0.5"} with a bar
    covey.only_if(short, exact)                in Python: the same reward, with its condition
    covey.only_if(short, "exact", at_least=0.5)

Where the condition fails the reward is 0; where the other reward was never given, so is this one (None). Conditions
look at the scores as they were given, so their order does not matter.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.errors import InputError, unknown
from covey.rewards.function import Columns, reward_name


@dataclass(frozen=True)
class Condition:
    reward: str
    needed: str
    at_least: float | None = None  # None: more than 0

    def met(self, score: float) -> bool:
        return score > 0 if self.at_least is None else score >= self.at_least


def only_if(reward: Callable[..., Any], needed: str | Callable[..., Any], at_least: float | None = None) -> Any:
    """The reward, with a condition on another reward of the run. `reward` itself stays as it is."""

    @functools.wraps(reward)
    def conditional(*args: Any, **kwargs: Any) -> Any:
        return reward(*args, **kwargs)

    name = needed if isinstance(needed, str) else reward_name(needed)
    conditional.reward_condition = Condition(reward_name(reward), name, at_least)  # type: ignore[attr-defined]
    return conditional


def find_conditions(
    functions: Sequence[Callable[..., Any]], written: Mapping[str, str], names: Sequence[str]
) -> tuple[Condition, ...]:
    """Those that came with the functions and those of the settings (which win), checked against the rewards' names."""
    found = {c.reward: c for f in functions if (c := getattr(f, "reward_condition", None)) is not None}
    found |= {reward: _parse(reward, text) for reward, text in written.items()}
    for condition in found.values():
        for name in (condition.reward, condition.needed):
            if name not in names:
                raise unknown("reward in reward.only_if", name, names)
        if condition.reward == condition.needed:
            raise InputError(f"reward.only_if: {condition.reward} cannot depend on itself")
    return tuple(found.values())


def _parse(reward: str, text: str) -> Condition:
    match = re.fullmatch(r"\s*([^\s<>=]+)\s*(?:>=\s*([-+.\deE]+)\s*)?", str(text))
    try:
        bar = None if match is None or match[2] is None else float(match[2])
    except ValueError:
        match = None
    if match is None:
        raise InputError(f"reward.only_if.{reward}={text}: write NAME, or NAME>=NUMBER")
    return Condition(reward, match[1], bar)


def apply(conditions: Sequence[Condition], scores: Columns) -> Columns:
    changed = dict(scores)
    for condition in conditions:
        needed, own = scores[condition.needed], scores[condition.reward]
        if needed is None or own is None:
            changed[condition.reward] = None
        elif not condition.met(needed):
            changed[condition.reward] = 0.0
    return changed
