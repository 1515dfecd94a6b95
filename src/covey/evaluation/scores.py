"""Scores of one model on one set of tasks in one sampling mode, and paired comparisons of models.

An answer is *right* if its reward reaches the threshold (1 by default). Answers that the infrastructure failed to
sample or score are excluded and counted by cause. A task without scored answers is skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np

from covey.evaluation.statistics import Estimate, majority, mcnemar, mean, pass_at_k, share, sign_flip

THRESHOLD = 1.0
Same = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class Answer:
    """One attempt at a task: a line of answers.jsonl."""

    model: str
    task: str  # the set of tasks
    mode: str  # greedy | sampled
    index: int  # of the task in its set
    id: str
    attempt: int
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    answer: str = ""  # the final answer, as the reward parses it
    tokens: int = 0
    stop: str | None = None
    failure: str | None = None  # cause
    message: str | None = None


@dataclass(frozen=True, slots=True)
class EvalSpec:
    """What is measured, and how its answers are scored."""

    model: str
    task: str
    mode: str
    n: int  # answers per task
    reward: str  # the reward that decides
    same: Same | None = None  # whether two final answers are equal; None: no majority vote
    threshold: float = THRESHOLD
    ks: tuple[int, ...] = (1,)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.task, self.mode


@dataclass(frozen=True, slots=True)
class Lengths:
    """Sampled tokens per answer, and the share of answers truncated by the limit."""

    mean: float
    median: float
    p90: float
    truncated: float


@dataclass(frozen=True, slots=True)
class Scores:
    spec: EvalSpec
    tasks: int  # tasks with at least one scored answer
    answers: int  # scored
    pass_at: Mapping[int, Estimate]
    average: Estimate | None  # mean reward; None: nothing was scored
    maj: Estimate | None
    rewards: Mapping[str, float]  # mean of every reward, extras included
    lengths: Lengths | None
    failures: Mapping[str, int]
    example: str = ""  # the message of one failure


def compute_scores(spec: EvalSpec, answers: Sequence[Answer]) -> Scores:
    """`answers` in the order of tasks and attempts."""
    scored = [answer for answer in answers if reward_of(spec, answer) is not None]
    failed = [answer for answer in answers if reward_of(spec, answer) is None]
    groups = list(by_task(scored).values())
    return Scores(
        spec,
        tasks=len(groups),
        answers=len(scored),
        pass_at=_pass_at(spec, groups),
        average=_average(spec, groups, len(scored)),
        maj=_maj(spec, groups),
        rewards=_mean_rewards(scored),
        lengths=_lengths(scored) if scored else None,
        failures=dict(Counter(answer.failure or "unscored" for answer in failed).most_common()),
        example=next((answer.message for answer in failed if answer.message), ""),
    )


def reward_of(spec: EvalSpec, answer: Answer) -> float | None:
    return None if answer.failure is not None else answer.rewards.get(spec.reward)


def by_task(answers: Sequence[Answer]) -> dict[tuple[int, str], list[Answer]]:
    groups: dict[tuple[int, str], list[Answer]] = {}
    for answer in answers:
        groups.setdefault((answer.index, answer.id), []).append(answer)
    return groups


def rewards_of(spec: EvalSpec, answers: Sequence[Answer]) -> list[float]:
    return [value for answer in answers if (value := reward_of(spec, answer)) is not None]


def verdicts(spec: EvalSpec, answers: Sequence[Answer]) -> list[bool]:
    """Whether each scored answer is right."""
    return [value >= spec.threshold - 1e-9 for value in rewards_of(spec, answers)]


Groups = Sequence[Sequence[Answer]]  # the scored answers of each task


def _pass_at(spec: EvalSpec, groups: Groups) -> dict[int, Estimate]:
    """Tasks with fewer than k scored answers are skipped."""
    counts = [(len(group), sum(verdicts(spec, group))) for group in groups]
    estimates = {}
    for k in spec.ks:
        enough = [(n, c) for n, c in counts if n >= k]
        if enough:
            estimates[k] = share([pass_at_k(n, c, k) for n, c in enough], sum(n for n, _ in enough))
    return estimates


def _average(spec: EvalSpec, groups: Groups, answers: int) -> Estimate | None:
    rewards = [rewards_of(spec, group) for group in groups]
    if not rewards:
        return None
    means = [fmean(values) for values in rewards]
    bounded = all(0.0 <= value <= 1.0 for values in rewards for value in values)
    return share(means, answers) if bounded else mean(means)


def _maj(spec: EvalSpec, groups: Groups) -> Estimate | None:
    """Share of tasks whose majority answer is right. A task without votes counts as wrong."""
    if spec.same is None or not groups:
        return None
    values = []
    for group in groups:
        index = majority([answer.answer for answer in group], spec.same)
        values.append(0.0 if index is None else float(verdicts(spec, group)[index]))
    return share(values, len(values))


def _mean_rewards(scored: Sequence[Answer]) -> dict[str, float]:
    means = {}
    for name in dict.fromkeys(name for answer in scored for name in answer.rewards):
        values = [value for answer in scored if (value := answer.rewards.get(name)) is not None]
        if values:
            means[name] = sum(values) / len(values)
    return means


def _lengths(scored: Sequence[Answer]) -> Lengths:
    tokens = [answer.tokens for answer in scored]
    median, p90 = np.quantile(tokens, [0.5, 0.9])
    truncated = sum(answer.stop == "length" for answer in scored)
    return Lengths(sum(tokens) / len(tokens), float(median), float(p90), truncated / len(scored))


# -- Paired comparisons ------------------------------------------------------------------------------------------------

SIGNIFICANCE = 0.05
MCNEMAR = "McNemar's exact test"
SIGN_FLIP = "sign-flip test over tasks"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on the tasks that both answered. `difference` is second − first, averaged over tasks."""

    task: str
    mode: str
    metric: str
    first: str
    second: str
    tasks: int
    first_value: float
    second_value: float
    difference: Estimate
    first_only: int  # tasks on which the first is better
    second_only: int
    test: str
    p: float


def compare_all(
    specs: Sequence[EvalSpec], answers: Mapping[tuple[str, str, str], Sequence[Answer]]
) -> list[Comparison]:
    """Every later model against the first one with the same tasks and mode."""
    comparisons = []
    for index, second in enumerate(specs):
        first = next((s for s in specs[:index] if (s.task, s.mode) == (second.task, second.mode)), None)
        if first is not None:
            comparisons += compare(first, second, answers[first.key], answers[second.key])
    return comparisons


def compare(first: EvalSpec, second: EvalSpec, ours: Sequence[Answer], theirs: Sequence[Answer]) -> list[Comparison]:
    """pass@1, and the mean reward if it differs from pass@1. Empty if no task is shared."""
    left = by_task([answer for answer in ours if reward_of(first, answer) is not None])
    right = by_task([answer for answer in theirs if reward_of(second, answer) is not None])
    shared = [key for key in left if key in right]
    if not shared:
        return []
    solved = [(verdicts(first, left[key]), verdicts(second, right[key])) for key in shared]
    single = all(len(a) == len(b) == 1 for a, b in solved)
    comparisons = [_comparison("pass@1", first, second, [(fmean(a), fmean(b)) for a, b in solved], single)]
    rewards = [(rewards_of(first, left[key]), rewards_of(second, right[key])) for key in shared]
    if any(value not in (0.0, 1.0) for pair in rewards for side in pair for value in side):
        pairs = [(fmean(a), fmean(b)) for a, b in rewards]
        comparisons.append(_comparison(f"avg@{second.n}", first, second, pairs, single=False))
    return comparisons


def _comparison(
    metric: str, first: EvalSpec, second: EvalSpec, pairs: Sequence[tuple[float, float]], single: bool
) -> Comparison:
    """`single`: each pair is one verdict against another, so McNemar's test applies."""
    differences = [b - a for a, b in pairs]
    difference = mean(differences)
    if metric == "pass@1" and len(pairs) > 1:  # shares differ by 1 at most
        difference = replace(difference, low=max(-1.0, difference.low), high=min(1.0, difference.high))
    worse, better = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
    return Comparison(
        task=second.task,
        mode=second.mode,
        metric=metric,
        first=first.model,
        second=second.model,
        tasks=len(pairs),
        first_value=fmean(a for a, _ in pairs),
        second_value=fmean(b for _, b in pairs),
        difference=difference,
        first_only=worse,
        second_only=better,
        test=MCNEMAR if single else SIGN_FLIP,
        p=mcnemar(worse, better) if single else sign_flip(differences),
    )


def sentence(comparison: Comparison, names: Mapping[str, str]) -> str:
    """The comparison in words. `names` maps models to short names."""
    c = comparison
    first, second = names[c.first], names[c.second]
    points = 100 if c.metric.startswith("pass") else 1
    value, low, high = (points * x for x in (c.difference.value, c.difference.low, c.difference.high))
    where = f"{c.task} ({c.mode}), {c.metric} over {c.tasks} tasks"
    if c.first_only == c.second_only == 0:
        return f"{where}: {second} and {first} do not differ on any task."
    unit = " points" if points == 100 else ""
    direction = "above" if value > 0 else "below" if value < 0 else "level with"
    size = f"{abs(value):.3g}{unit} " if value else ""
    bounds = f"95 % interval {low:+.3g} to {high:+.3g}" if c.tasks > 1 else "no interval from a single task"
    meaning = (
        "were they equally good, a difference this large would be rare"
        if c.p < SIGNIFICANCE
        else "were they equally good, a difference this large could well come about by chance"
    )
    return (
        f"{where}: {second} is {size}{direction} {first} ({bounds}); better on {c.second_only} tasks, worse on "
        f"{c.first_only}. {c.test}: p = {format_p(c.p)}; {meaning}."
    )


def format_p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
