"""From answers to figures: what is said of one model on one set of tasks in one mode of sampling.

An answer is *right* if its reward reaches the bar (1 unless told otherwise). What the infrastructure failed to sample
or score is no answer: it is in no figure, and counted by cause. A task of which nothing was scored is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from covey.evaluation.statistics import Estimate, majority, mcnemar, mean, pass_at_k, share, sign_flip

BAR = 1.0
Same = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class Answer:
    """One attempt at a task: a line of answers.jsonl."""

    model: str
    task: str  # the set of tasks
    mode: str  # greedy | sampled
    index: int  # place of the task in its set
    id: str
    attempt: int
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    answer: str = ""  # the final answer, as the reward understands it
    tokens: int = 0
    stop: str | None = None
    failure: str | None = None  # cause
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured, and how its answers are to be read."""

    model: str
    task: str
    mode: str
    n: int  # answers asked of each task
    reward: str  # the one that decides
    same: Same | None = None  # whether two final answers are one; None: there is no vote
    bar: float = BAR
    ks: tuple[int, ...] = (1,)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.task, self.mode


@dataclass(frozen=True, slots=True)
class Lengths:
    """Sampled tokens of an answer, and the share of answers that the limit cut off."""

    mean: float
    median: float
    p90: float
    truncated: float


@dataclass(frozen=True, slots=True)
class Figures:
    subject: Subject
    tasks: int  # of which something was scored
    answers: int  # scored
    pass_at: Mapping[int, Estimate]
    average: Estimate | None  # None: nothing was scored
    maj: Estimate | None
    rewards: Mapping[str, float]  # mean of every column, extras too
    lengths: Lengths | None
    failures: Mapping[str, int]
    example: str = ""  # what one of the failures said


def figures(subject: Subject, answers: Sequence[Answer]) -> Figures:
    """`answers` in the order of tasks and attempts."""
    scored = [answer for answer in answers if score(subject, answer) is not None]
    failed = [answer for answer in answers if score(subject, answer) is None]
    tasks = by_task(scored)
    return Figures(
        subject,
        tasks=len(tasks),
        answers=len(scored),
        pass_at=_pass_at(subject, tasks),
        average=_average(subject, tasks, len(scored)),
        maj=_maj(subject, tasks),
        rewards=_columns(scored),
        lengths=_lengths(scored) if scored else None,
        failures=dict(Counter(answer.failure or "unscored" for answer in failed).most_common()),
        example=next((answer.message for answer in failed if answer.message), ""),
    )


def score(subject: Subject, answer: Answer) -> float | None:
    return None if answer.failure is not None else answer.rewards.get(subject.reward)


def by_task(answers: Sequence[Answer]) -> dict[tuple[int, str], list[Answer]]:
    found: dict[tuple[int, str], list[Answer]] = {}
    for answer in answers:
        found.setdefault((answer.index, answer.id), []).append(answer)
    return found


def verdicts(subject: Subject, answers: Sequence[Answer]) -> list[bool]:
    """Of answers that were scored."""
    return [value >= subject.bar - 1e-9 for value in scores(subject, answers)]


def scores(subject: Subject, answers: Sequence[Answer]) -> list[float]:
    return [value for answer in answers if (value := score(subject, answer)) is not None]


Tasks = Mapping[tuple[int, str], Sequence[Answer]]


def _pass_at(subject: Subject, tasks: Tasks) -> dict[int, Estimate]:
    """A task with fewer than k answers left has no pass@k."""
    counts = [(len(group), sum(verdicts(subject, group))) for group in tasks.values()]
    found = {}
    for k in subject.ks:
        enough = [(n, c) for n, c in counts if n >= k]
        if enough:
            found[k] = share([pass_at_k(n, c, k) for n, c in enough], sum(n for n, _ in enough))
    return found


def _average(subject: Subject, tasks: Tasks, answers: int) -> Estimate | None:
    groups = [scores(subject, group) for group in tasks.values()]
    if not groups:
        return None
    means = [fmean(group) for group in groups]
    bounded = all(0.0 <= value <= 1.0 for group in groups for value in group)
    return share(means, answers) if bounded else mean(means)


def _maj(subject: Subject, tasks: Tasks) -> Estimate | None:
    """Whether the answer that most agree on is right. Where nobody voted, it is not."""
    if subject.same is None or not tasks:
        return None
    found = []
    for group in tasks.values():
        place = majority([answer.answer for answer in group], subject.same)
        found.append(0.0 if place is None else float(verdicts(subject, group)[place]))
    return share(found, len(found))


def _columns(scored: Sequence[Answer]) -> dict[str, float]:
    found = {}
    for name in dict.fromkeys(name for answer in scored for name in answer.rewards):
        values = [value for answer in scored if (value := answer.rewards.get(name)) is not None]
        if values:
            found[name] = sum(values) / len(values)
    return found


def _lengths(scored: Sequence[Answer]) -> Lengths:
    tokens = [answer.tokens for answer in scored]
    median, p90 = np.quantile(tokens, [0.5, 0.9])
    cut = sum(answer.stop == "length" for answer in scored)
    return Lengths(sum(tokens) / len(tokens), float(median), float(p90), cut / len(scored))


# -- Models side by side: each against the first, on the tasks that both answered --------------------------------------

SURE = 0.05
MCNEMAR = "McNemar's exact test"
FLIPS = "sign-flip test over tasks"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`difference` is second − first, a task at a time."""

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
    subjects: Sequence[Subject], answers: Mapping[tuple[str, str, str], Sequence[Answer]]
) -> list[Comparison]:
    """Every later model against the first one that was measured on the same tasks in the same mode."""
    found = []
    for place, second in enumerate(subjects):
        alike = [s for s in subjects[:place] if (s.task, s.mode) == (second.task, second.mode)]
        if alike:
            found += compare(alike[0], second, answers[alike[0].key], answers[second.key])
    return found


def compare(first: Subject, second: Subject, ours: Sequence[Answer], theirs: Sequence[Answer]) -> list[Comparison]:
    """pass@1, and the mean reward where it is another figure. Nothing where no task is shared."""
    left = by_task([answer for answer in ours if score(first, answer) is not None])
    right = by_task([answer for answer in theirs if score(second, answer) is not None])
    shared = [key for key in left if key in right]
    if not shared:
        return []
    solved = [(verdicts(first, left[key]), verdicts(second, right[key])) for key in shared]
    found = [_comparison("pass@1", first, second, [(fmean(a), fmean(b)) for a, b in solved], solved)]
    earned = [(scores(first, left[key]), scores(second, right[key])) for key in shared]
    if any(value not in (0.0, 1.0) for pair in earned for side in pair for value in side):
        found.append(_comparison(f"avg@{second.n}", first, second, [(fmean(a), fmean(b)) for a, b in earned], None))
    return found


def _comparison(
    metric: str,
    first: Subject,
    second: Subject,
    pairs: Sequence[tuple[float, float]],
    solved: Sequence[tuple[Sequence[bool], Sequence[bool]]] | None,
) -> Comparison:
    differences = [b - a for a, b in pairs]
    worse, better = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
    single = solved is not None and all(len(a) == len(b) == 1 for a, b in solved)
    return Comparison(
        task=second.task,
        mode=second.mode,
        metric=metric,
        first=first.model,
        second=second.model,
        tasks=len(pairs),
        first_value=fmean(a for a, _ in pairs),
        second_value=fmean(b for _, b in pairs),
        difference=mean(differences),
        first_only=worse,
        second_only=better,
        test=MCNEMAR if single else FLIPS,
        p=mcnemar(worse, better) if single else sign_flip(differences),
    )


def sentence(found: Comparison, names: Mapping[str, str]) -> str:
    """What a comparison means, in words. `names` are the models' short names."""
    first, second = names[found.first], names[found.second]
    points = 100 if found.metric.startswith("pass") else 1
    value, low, high = (points * x for x in (found.difference.value, found.difference.low, found.difference.high))
    where = f"{found.task} ({found.mode}), {found.metric} over {found.tasks} tasks"
    if found.first_only == found.second_only == 0:
        return f"{where}: {second} and {first} do not differ on any task."
    unit = " points" if points == 100 else ""
    way = "above" if value > 0 else "below" if value < 0 else "level with"
    size = f"{abs(value):.3g}{unit} " if value else ""
    bounds = f"95 % interval {low:+.3g} to {high:+.3g}" if found.tasks > 1 else "one task says nothing of others"
    meaning = (
        "were they equally good, a difference this large would be rare"
        if found.p < SURE
        else "were they equally good, a difference this large could well come about by chance"
    )
    return (
        f"{where}: {second} is {size}{way} {first} ({bounds}); better on {found.second_only} tasks, worse on "
        f"{found.first_only}. {found.test}: p = {p_text(found.p)}; {meaning}."
    )


def p_text(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
