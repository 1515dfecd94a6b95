"""Figures of a run, from its record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from studies.record import Record

LAST = 10  # steps that "first" and "last" are means of


@dataclass(frozen=True)
class Evaluated:
    """An evaluation after `step` updates and `seconds` of training."""

    step: int
    seconds: float
    values: tuple[float, ...]  # of each problem; a failed answer counts as 0
    tokens: tuple[int, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)


def evaluations(record: Record, metric: str) -> list[Evaluated]:
    seconds = cumulative_seconds(record)
    found = []
    for one in record["evaluations"]["at"]:
        values = tuple(float(value or 0) for value in one["rewards"][metric])
        found.append(Evaluated(one["step"], seconds[one["step"]], values, tuple(one.get("tokens", ()))))
    return found


def cumulative_seconds(record: Record) -> list[float]:
    """Seconds of training before each step, and after the last: evaluations and starts are not counted."""
    total, found = 0.0, [0.0]
    for value in record["steps"]["timing/step"]:
        total += value
        found.append(total)
    return found


def at_time(record: Record, metric: str, seconds: float) -> Evaluated:
    """The last evaluation within this time of training."""
    return [one for one in evaluations(record, metric) if one.seconds <= seconds][-1]


def ends(record: Record, name: str) -> tuple[float, float] | None:
    """Mean of a metric over the first and the last steps; None if the run does not have it."""
    values = [value for value in record["steps"].get(name, ()) if value is not None]
    return (fmean(values[:LAST]), fmean(values[-LAST:])) if values else None


def final_kl(record: Record) -> float | None:
    """Nats per token to the start model, mean of the last steps that were measured."""
    values = record["kl"]["per_token"] if record["kl"] else []
    return fmean(values[-LAST:]) if values else None


def reward_ends(record: Record) -> tuple[float, float] | None:
    """Of all sampled answers, also those of groups that were filtered."""
    mean, every = record["steps"].get("reward/mean", []), record["steps"].get("reward/unfiltered_mean")
    values = [m if every is None or every[n] is None else every[n] for n, m in enumerate(mean)]
    values = [value for value in values if value is not None]
    return (fmean(values[:LAST]), fmean(values[-LAST:])) if values else None


def column_mean(record: Record, at: int, name: str) -> float | None:
    """Mean over the answers of an evaluation: tokens, turns, tools, cut."""
    values = record["evaluations"]["at"][at].get(name)
    return fmean(values) if values else None


def seconds_per_step(record: Record) -> float:
    return fmean(record["steps"]["timing/step"])


def sampled_tokens(record: Record) -> float:
    return sum(value or 0 for value in record["steps"]["perf/generated_tokens"])


def transfer(record: Record, name: str, metric: str, when: str) -> list[float] | None:
    found: dict[str, Any] | None = record["transfer"].get(when, {}).get(name)
    return None if found is None else [float(value or 0) for value in found["rewards"][metric]]


def mean_of(records: Sequence[Record], figure: Callable[[Record], float | None]) -> float | None:
    values = [value for record in records if (value := figure(record)) is not None]
    return fmean(values) if values else None
