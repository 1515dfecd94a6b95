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

from covey.evaluation.statistics import Estimate, majority, mean, pass_at_k, share

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
