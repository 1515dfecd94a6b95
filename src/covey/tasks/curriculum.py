"""Task samplers by observed success (`data.sampler`): which tasks a step gets.

Each attempt scores x ∈ [0, 1]: the trained reward, clipped. A group of k attempts at a task adds k observations, its
mean x̄ and their mean absolute deviation from it, d = mean |x − x̄|, the size of the advantages before normalisation.
If the reward names roles, each trained role of an attempt scores, and x̄ in d is the mean of its role.
Observations fade with a half-life, so a task that was not drawn for long is estimated as an unseen one:

    p = (c·p₀ + s) / (c + n)        n observations and their sum s, both times 2^(−age / half_life); c = prior attempts
    m = (c·½ + a) / (c + n)         a the sum of the deviations; ½ is the largest possible

    sampler        weight of a task
    band           exp(−(p − target)² / 2 width²), p₀ = target: unseen tasks count as on target
    uncertainty    p (1 − p), p₀ = ½: the variance of one attempt; "learnability", Rutherford et al. 2024,
                   https://arxiv.org/abs/2408.15099, and Foster and Foerster 2025, https://arxiv.org/abs/2502.12272
    priority       (1 − staleness) · m / Σm + staleness · age / Σage; after prioritised level replay, Jiang et al. 2021,
                   https://arxiv.org/abs/2010.03934
    buckets        1 for the buckets of difficulty that have joined; the others fill up a batch that is too small

A step draws without replacement, each task with probability (1 − explore) · weight / Σ weight + explore / tasks: the
largest log(u) / probability win (Efraimidis and Spirakis 2006), with u from the stream of (seed, step).

Deviations: prioritised replay ranks its scores and has a separate probability of unseen levels; here the prior is the
score of an unseen task. For `buckets` nothing is observed that changes a draw.

The draws of a step depend on the seed, the step and the results observed before it, all of which a checkpoint has.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from heapq import nlargest
from statistics import fmean
from typing import Any

from covey.config.schema import DataConfig
from covey.errors import InputError, unknown
from covey.ranges import Positive, PositiveShare, Share, Steps, check_ranges
from covey.streams import stream
from covey.tasks.load import steps_per_epoch
from covey.types import Group, Task

LARGEST_DEVIATION = 0.5  # mean |x − x̄| of values in [0, 1]
KEPT = 2048  # steps whose draws are remembered: more than mode.max_staleness allows to be in progress
BUCKETS = 4  # of a numeric column, if `starts` gives no other number
OF_ALL = ("prior", "half_life", "explore")
OPTIONS = {  # by sampler
    "uniform": (),
    "band": ("target", "width", *OF_ALL),
    "uncertainty": OF_ALL,
    "priority": ("staleness", *OF_ALL),
    "buckets": ("column", "levels", "starts"),
}


@dataclass(frozen=True)
class SamplerOptions:
    """`data.sampler_options`. The table of docs/curriculum.md explains them."""

    target: Share = 0.5
    width: PositiveShare = 0.25
    prior: Positive = 1.0
    half_life: Steps = 0
    explore: Share = 0.1
    staleness: Share = 0.3
    column: str | None = None
    levels: list[Any] = field(default_factory=list)  # words or numbers
    starts: list[Steps] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_ranges(self, "data.sampler_options.")
        if list(self.starts) != sorted(self.starts) or (self.starts and self.starts[0] != 0):
            raise InputError(
                f"data.sampler_options.starts={self.starts} are the steps at which buckets join, from easy to hard\n"
                "  they start with 0 and never fall: [0,50,100]"
            )


def sampler_options(data: DataConfig) -> SamplerOptions:
    """The options of the sampler. Those of another one are refused."""
    if data.sampler_options and not OPTIONS[data.sampler]:
        raise InputError(
            f"data.sampler_options.{next(iter(data.sampler_options))} has no effect: data.sampler={data.sampler} has "
            "no options\n  name another sampler, or remove it"
        )
    for name in data.sampler_options:
        if name not in OPTIONS[data.sampler]:
            raise unknown(f"option of data.sampler={data.sampler}", name, OPTIONS[data.sampler])
    return SamplerOptions(**data.sampler_options)


@dataclass(frozen=True, slots=True)
class Observed:
    """What was observed of one task, as of `step`. `rate` is the mean of its last group."""

    count: float
    success: float
    deviation: float
    step: int
    rate: float

    def fade(self, step: int, half_life: int) -> float:
        return float(2.0 ** (-(step - self.step) / half_life))


class Curriculum:
    """Draws the tasks of each step, observes their groups, and keeps both in the checkpoint."""

    def __init__(
        self, tasks: Sequence[Task], data: DataConfig, batch_size: int, *, seed: int, steps: int, reward: str
    ) -> None:
        """`steps`: of the whole run. `reward`: the name of the one that measures success."""
        assert data.sampler != "uniform"
        self.tasks = tasks
        self.sampler = data.sampler
        self.options = sampler_options(data)
        self.batch_size = batch_size
        self.seed = seed
        self.reward = reward
        self.half_life = self.options.half_life or steps_per_epoch(len(tasks), batch_size)
        by_bucket = self.sampler == "buckets"
        self.buckets, self.starts = task_buckets(tasks, self.options, steps) if by_bucket else ([], ())
        self.index = {task.id: at for at, task in enumerate(tasks)}
        self.observed: dict[int, Observed] = {}  # by index of the task
        self.drawn: dict[int, list[int]] = {}  # by step: asynchronous training draws ahead, and asks again

    # -- Drawing -------------------------------------------------------------------------------------------------------

    def batch(self, step: int) -> list[Task]:
        if step not in self.drawn:
            self.drawn[step] = self._draw(step, self.batch_size, ("curriculum", self.seed, step), set())
        return [self.tasks[at] for at in self.drawn[step]]

    def fresh(self, step: int, round: int, count: int, tried: Collection[str]) -> list[Task]:
        """Up to `count` tasks that this step has not tried yet, to replace some without a learning signal."""
        without = {self.index[id] for id in tried}
        return [self.tasks[at] for at in self._draw(step, count, ("fresh", self.seed, step, round), without)]

    def _draw(self, step: int, count: int, name: tuple[object, ...], without: Collection[int]) -> list[int]:
        random = stream(*name).random
        keys = []
        for at, share in enumerate(self.probabilities(step)):
            log_u = math.log(1.0 - random())  # one number per task, whatever was tried
            if at not in without:
                keys.append((share > 0, log_u / share if share > 0 else log_u, at))
        return [at for *_, at in nlargest(count, keys)]

    def probabilities(self, step: int) -> list[float]:
        """The share of each task in the draws of a step."""
        weights, uniform = self._weights(step), 1 / len(self.tasks)
        total, explore = math.fsum(weights), 0.0 if self.sampler == "buckets" else self.options.explore
        if total == 0:
            return [uniform] * len(self.tasks)
        return [(1 - explore) * weight / total + explore * uniform for weight in weights]

    def _weights(self, step: int) -> list[float]:
        match self.sampler:
            case "band":
                return self._per_task(step, self._band)
            case "uncertainty":
                return self._per_task(step, lambda seen, fade: (p := self._estimate(0.5, seen, fade)) * (1 - p))
            case "priority":
                return self._priorities(step)
            case _:
                joined = bisect_right(self.starts, step)
                return [float(bucket < joined) for bucket in self.buckets]

    def _band(self, seen: Observed | None, fade: float) -> float:
        distance = self._estimate(self.options.target, seen, fade) - self.options.target
        return math.exp(-0.5 * (distance / self.options.width) ** 2)

    def _priorities(self, step: int) -> list[float]:
        deviations, ages = self._per_task(step, self._deviation), [float(step + 1)] * len(self.tasks)
        for at, seen in self.observed.items():
            ages[at] = float(step - seen.step)
        sizes, stale = math.fsum(deviations), self.options.staleness
        total = math.fsum(ages)
        return [(1 - stale) * m / sizes + stale * age / total for m, age in zip(deviations, ages, strict=True)]

    def _per_task(self, step: int, weight: Callable[[Observed | None, float], float]) -> list[float]:
        """The weight of each task, which is the same for all that are unseen."""
        weights = [weight(None, 0.0)] * len(self.tasks)
        for at, seen in self.observed.items():
            weights[at] = weight(seen, seen.fade(step, self.half_life))
        return weights

    def _estimate(self, prior: float, seen: Observed | None, fade: float) -> float:
        if seen is None:
            return prior
        strength = self.options.prior
        return (strength * prior + fade * seen.success) / (strength + fade * seen.count)

    def _deviation(self, seen: Observed | None, fade: float) -> float:
        if seen is None:
            return LARGEST_DEVIATION
        strength = self.options.prior
        return (strength * LARGEST_DEVIATION + fade * seen.deviation) / (strength + fade * seen.count)

    # -- Observing -----------------------------------------------------------------------------------------------------

    def observe(self, step: int, groups: Iterable[Group]) -> dict[str, float]:
        """Record the groups of a step, including those without a learning signal. Returns metrics."""
        for group in groups:
            columns: dict[str | None, list[float]] = {}  # by role
            for episode in (episode for episode in group.episodes if episode.failure is None):
                for role, score in episode.outcomes(self.reward).items():
                    columns.setdefault(role, []).append(min(1.0, max(0.0, score)))
            if columns:
                self._record(self.index[group.task.id], step, list(columns.values()))
        self.drawn = {drawn: tasks for drawn, tasks in self.drawn.items() if drawn > step - KEPT}
        return self.metrics(step + 1)

    def _record(self, at: int, step: int, columns: Sequence[Sequence[float]]) -> None:
        values = [value for column in columns for value in column]
        deviations = [abs(value - fmean(column)) for column in columns for value in column]
        rate, former = fmean(values), self.observed.get(at)
        fade = former.fade(step, self.half_life) if former else 0.0
        count, success, deviation = (former.count, former.success, former.deviation) if former else (0.0, 0.0, 0.0)
        self.observed[at] = Observed(
            fade * count + len(values),
            fade * success + math.fsum(values),
            fade * deviation + math.fsum(deviations),
            step,
            rate,
        )

    def metrics(self, step: int) -> dict[str, float]:
        """The state of the tasks before a step. Shares are of the tasks that were observed, by their last group."""
        rates, band = [seen.rate for seen in self.observed.values()], self.options
        seen = max(1, len(rates))
        return {
            "curriculum/coverage": len(rates) / len(self.tasks),
            "curriculum/solved": sum(rate == 1 for rate in rates) / seen,
            "curriculum/unsolved": sum(rate == 0 for rate in rates) / seen,
            "curriculum/in_band": sum(abs(rate - band.target) <= band.width for rate in rates) / seen,
            "curriculum/effective_tasks": 1 / math.fsum(share**2 for share in self.probabilities(step)),
        }

    # -- Checkpoints ---------------------------------------------------------------------------------------------------

    def state(self, steps: Collection[int]) -> dict[str, Any]:
        """The state to checkpoint, with the draws of these steps, whose groups are not all trained on."""
        return {
            "observed": {self.tasks[at].id: astuple(seen) for at, seen in self.observed.items()},
            "drawn": {str(step): self.drawn[step] for step in sorted(steps)},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.observed = {self.index[id]: Observed(*row) for id, row in state["observed"].items()}
        self.drawn = {int(step): drawn for step, drawn in state["drawn"].items()}


# -- Buckets of difficulty ---------------------------------------------------------------------------------------------


def task_buckets(tasks: Sequence[Task], options: SamplerOptions, steps: int) -> tuple[list[int], tuple[int, ...]]:
    """The bucket of each task, from 0 for the easiest, and the step at which each bucket joins: by default evenly over
    the first half of the run."""
    if options.column is None:
        raise InputError(
            "data.sampler=buckets reads a task's difficulty from a column, and data.sampler_options.column names none\n"
            f"  columns of the first task: {', '.join(tasks[0].columns) or 'none'}"
        )
    if not any(options.column in task.columns for task in tasks):
        found = dict.fromkeys(name for task in tasks for name in task.columns)
        raise InputError(
            f"data.sampler_options.column={options.column}: no task has such a column\n"
            f"  columns of the data: {', '.join(found) or 'none'}"
        )
    values = [_difficulty(task, options) for task in tasks]
    count = len(options.levels) or len(options.starts) or BUCKETS
    if options.starts and len(options.starts) != count:
        raise InputError(
            f"data.sampler_options.starts={options.starts} has {len(options.starts)} steps for the {count} levels\n"
            "  give one step for each of data.sampler_options.levels"
        )
    starts = tuple(options.starts) or tuple(bucket * steps // (2 * count) for bucket in range(count))
    if options.levels:
        return [int(value) for value in values], starts
    ordered = sorted(values)
    bounds = [ordered[bucket * len(ordered) // count] for bucket in range(1, count)]  # equal values share a bucket
    return [bisect_right(bounds, value) for value in values], starts


def unused_levels(tasks: Sequence[Task], options: SamplerOptions) -> list[str]:
    """A warning about levels that no task has: their steps add no tasks."""
    known = {str(task.columns.get(options.column or "")) for task in tasks}
    missing = [str(level) for level in options.levels if str(level) not in known]
    return [f"data.sampler_options.levels: no task has the level {', '.join(missing)}"] if missing else []


def _difficulty(task: Task, options: SamplerOptions) -> float:
    value = task.columns.get(options.column or "")
    if options.levels:
        if str(value) in (levels := list(map(str, options.levels))):
            return levels.index(str(value))
        known, fix = (
            f"not one of data.sampler_options.levels={options.levels}",
            "add it to the levels, from easy to hard",
        )
    else:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return value
        known, fix = "not a number", "give the words from easy to hard: data.sampler_options.levels=[easy,hard]"
    raise InputError(f"{task.where}: its difficulty, column {options.column}, is {value!r:.80}, {known}\n  fix: {fix}")
