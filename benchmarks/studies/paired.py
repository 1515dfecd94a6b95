"""Estimates over seeds and test problems, and paired comparisons of two experiments.

    x[s][p]   what the run with seed s scored on problem p; a difference of two experiments is formed for each (s, p)
    V         = V_seeds + V_problems − V_rest: the variance of the mean if both seeds and problems were drawn
                V_seeds = var over seeds of the seeds' means / S        V_problems = var over problems / P
                V_rest = var of all values / (S · P), counted in both
    interval  Student's, with Satterthwaite's degrees of freedom

So the interval answers: what if somebody repeats it with other seeds and other problems of this kind? The p-value is
that of covey eval, over problems: could these very runs be equally good? With one seed only the latter can be answered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from covey.evaluation.scores import SIGNIFICANCE, format_p
from covey.evaluation.statistics import Estimate, mean, share, sign_flip, student

Values = Sequence[Sequence[float]]  # seeds × problems


def crossed(values: Values) -> Estimate:
    """The mean with its 95 % interval over seeds and problems; with one seed over problems."""
    seeds, problems = len(values), len(values[0])
    if seeds == 1:
        return mean(values[0])
    assert all(len(row) == problems for row in values)
    of_seeds = variance([fmean(row) for row in values]) / seeds
    of_problems = variance([fmean(column) for column in zip(*values, strict=True)]) / problems if problems > 1 else 0.0
    everything = variance([value for row in values for value in row]) / (seeds * problems)
    centre = fmean([fmean(row) for row in values])
    total = max(of_seeds + of_problems - everything, of_seeds, of_problems)
    if total == 0:
        return Estimate(centre, centre, centre)
    freedom = total**2 / (of_seeds**2 / (seeds - 1) + of_problems**2 / max(1, problems - 1))
    half = student(max(1, math.floor(freedom))) * math.sqrt(total)
    return Estimate(centre, centre - half, centre + half)


def accuracy(values: Values) -> Estimate:
    """The same for verdicts between 0 and 1, within these bounds; with one seed Wilson's interval."""
    if len(values) == 1:
        return share(values[0], len(values[0]))
    found = crossed(values)
    return Estimate(found.value, max(0.0, found.low), min(1.0, found.high))


@dataclass(frozen=True)
class Difference:
    """Second − first. `by_seed` has the difference of each pair of runs with the same seed."""

    first: str
    second: str
    estimate: Estimate
    by_seed: tuple[float, ...]
    p: float  # over problems, of these runs

    @property
    def is_clear(self) -> bool:
        """Whether an order is claimed: more than one seed, and an interval without 0."""
        return len(self.by_seed) > 1 and (self.estimate.low > 0 or self.estimate.high < 0)

    def sentence(self, what: str = "points") -> str:
        value, low, high = (100 * x for x in (self.estimate.value, self.estimate.low, self.estimate.high))
        bounds = f"[{low:+.1f}, {high:+.1f}]"
        p = f"p {format_p(self.p)}" if self.p < 0.001 else f"p = {format_p(self.p)}"
        if self.is_clear:
            side = "above" if value > 0 else "below"
            return f"{self.second} is {abs(value):.1f} {what} {side} {self.first} {bounds}."
        if len(self.by_seed) == 1:
            found = "differ" if self.p < SIGNIFICANCE else "do not differ beyond chance"
            return (
                f"{self.second} and {self.first}: {value:+.1f} {what} {bounds}; these two runs {found} ({p}), and one "
                "run each says nothing about the methods."
            )
        return f"{self.second} and {self.first}: {value:+.1f} {what} {bounds}, within noise."


def compare(first: str, second: str, before: Values, after: Values) -> Difference:
    """Both with the same seeds and problems, in the same order."""
    values = [[b - a for a, b in zip(one, two, strict=True)] for one, two in zip(before, after, strict=True)]
    by_problem = [fmean(column) for column in zip(*values, strict=True)]
    found = crossed(values)
    bounded = Estimate(found.value, max(-1.0, found.low), min(1.0, found.high))  # of shares
    return Difference(first, second, bounded, tuple(fmean(row) for row in values), sign_flip(by_problem))
