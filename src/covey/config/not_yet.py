"""What people ask for and Covey cannot do yet. A capability that lands takes its rows out of this table.

Values that mean "off" are accepted, so a configuration that names these keys without using them still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from covey.config.read import Given

Test = Callable[[Any], bool]


def number(value: Any) -> float:
    """The number that a value means, also where YAML quoted it; 0 where it means none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def true(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "yes", "on", "1")


def off(value: Any) -> bool:
    """Whether a value means none, in any of the ways that YAML and the command line write it."""
    try:
        return float(value) == 0
    except (TypeError, ValueError):
        return value is None or str(value).strip().lower() in ("", "none", "null", "false", "no", "off")


def false(value: Any) -> bool:
    return value is not None and not true(value)


def over(bound: float) -> Test:
    return lambda value: number(value) > bound


def is_(*names: str) -> Test:
    return lambda value: str(value).lower() in names


def is_not(*names: str) -> Test:
    return lambda value: value is not None and str(value).lower() not in names


@dataclass(frozen=True)
class NotYet:
    key: str  # as `aliases.translate` gives it
    when: Test
    capability: str
    instead: str


_OWN_AGENT = "use agent=chat, or your own coroutine: agent=my_agent.py:function"
_ONE = "leave it at 1"

NOT_YET = (
    # Agents
    NotYet("agent.name", is_("gui"), "agents that look at a screen", _OWN_AGENT),
    NotYet("env.reasoning", true, "the reasoning prompt", "write it out: data.system_prompt='…'"),
    # Where and when things run
    NotYet("rollout.name", is_("sglang", "hf"), "other engines", "use rollout=embedded or rollout=vllm"),
    NotYet("cluster.name", is_("slurm"), "starting Slurm jobs by itself", "write the job's script: covey slurm"),
    NotYet("actor.ulysses_sequence_parallel_size", over(1), "sequence parallelism", _ONE),
    NotYet("train_model.quantization.enabled", true, "quantised training", "set it to false"),
    NotYet("optimizer.name", is_not("adamw", "adam"), "other optimisers", "use AdamW"),
)

NOT_YET_KEYS = frozenset(row.key for row in NOT_YET)


def find_not_yet(slots: Mapping[str, Given]) -> dict[str, str]:
    """Everything that is asked for and not there: the slot, and what to say about it."""
    return {
        key: f"not available yet: {row.capability}  ({given.place}{given.key}={_short(given.value)})\n  {row.instead}"
        for key, given in slots.items()
        for row in _rows(key)
        if row.when(given.value)
    }


def _rows(key: str) -> Iterable[NotYet]:
    return (row for row in NOT_YET if row.key == key)


def _short(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
