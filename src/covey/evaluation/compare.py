"""Models side by side: each against the first, on the tasks that both answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from covey.evaluation.figures import Answer, Subject, by_task, score, scores, verdicts
from covey.evaluation.statistics import Estimate, mcnemar, mean, sign_flip

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
