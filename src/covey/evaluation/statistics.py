"""What n answers to each of some tasks say about a model: estimates, intervals and tests. Pure mathematics, no I/O.

    pass@k    1 − C(n−c, k) / C(n, k)              of n answers c are right; unbiased (Chen et al. 2021)
    maj@n     the answer most of the n agree on
    interval  95 %, over tasks: answers to one task are not independent of each other, tasks are
    tests     of two models on the same tasks: exact McNemar for verdicts, sign flips for means

Every function gives the same result for the same numbers: where chance is used, it has a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959963984540054  # of the normal distribution: 95 % lie within ± Z
EXACT_FLIPS = 14  # so many differences or fewer: all 2^T sign patterns are enumerated
FLIPS = 10_000  # random sign patterns otherwise
SEED = 20_240_229


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % confidence interval."""

    value: float
    low: float
    high: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k answers is right, drawn from n of which c are.

    C(n−c, k) / C(n, k) = Π_{i=n−c+1..n} (1 − k/i): factors between 0 and 1, so nothing overflows.
    """
    assert 0 <= c <= n and 1 <= k <= n
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def powers_up_to(n: int) -> tuple[int, ...]:
    """1, 2, 4, … and n itself: the k of pass@k."""
    powers = [2**i for i in range(n.bit_length()) if 2**i <= n]
    return tuple(powers if powers[-1] == n else [*powers, n])


def majority(answers: Sequence[str], same: Callable[[str, str], bool]) -> int | None:
    """The place of the first answer that the largest camp agrees on; among camps of one size, of the one seen first.

    An answer joins the first camp whose first answer it is the same as. An empty answer is no vote; None: nobody voted.
    """
    camps: dict[int, int] = {}  # place of a camp's first answer → votes
    for place, answer in enumerate(answers):
        if answer:
            camp = next((first for first in camps if same(answers[first], answer)), place)
            camps[camp] = camps.get(camp, 0) + 1
    return max(camps, key=lambda first: camps[first]) if camps else None


def share(values: Sequence[float], answers: int) -> Estimate:
    """The mean of one value per task, each between 0 and 1, with Wilson's interval.

    Its number of trials is the effective one, p(1−p)/SE², where SE is that of the mean over tasks: one verdict per task
    makes it the number of tasks, which is the plain Wilson interval; tasks whose values are all near p make it more,
    up to the number of answers. Where p is 0 or 1 it is the number of tasks.
    """
    T = len(values)
    assert T > 0 and answers >= T
    p = min(1.0, math.fsum(values) / T)
    spread = math.fsum((x - p) ** 2 for x in values) / T  # of tasks
    unit = p * (1.0 - p)
    if T == 1 or unit < 1e-12:
        trials: float = T
    else:
        trials = min(T * unit / spread, answers) if spread > 0 else answers
    centre = (p + Z**2 / (2 * trials)) / (1 + Z**2 / trials)
    half = Z / (1 + Z**2 / trials) * math.sqrt(unit / trials + Z**2 / (4 * trials**2))
    return Estimate(p, max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)))


def mean(values: Sequence[float]) -> Estimate:
    """The mean of one value per task, on any scale. Interval: Student's, with the standard error over tasks. One task
    says nothing of others: its interval has no ends."""
    T = len(values)
    assert T > 0
    centre = math.fsum(values) / T
    if T == 1:
        return Estimate(centre, -math.inf, math.inf)
    error = math.sqrt(math.fsum((x - centre) ** 2 for x in values) / (T - 1) / T)
    half = student(T - 1) * error
    return Estimate(centre, centre - half, centre + half)


def student(freedom: int) -> float:
    """How many standard errors hold 95 % of Student's distribution: exact for 1 and 2 degrees of freedom, else Fisher's
    expansion in 1/freedom (within 1 % from 3 on, 0.1 % from 6 on)."""
    if freedom == 1:
        return math.tan(0.475 * math.pi)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025))
    terms = (
        Z,
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def mcnemar(first_only: int, second_only: int) -> float:
    """Two-sided p-value of so many tasks that only the first model solves, and only the second: were the two equally
    good, each of those would be a fair coin. Exact."""
    coins, fewer = first_only + second_only, min(first_only, second_only)
    tail = sum(math.comb(coins, i) for i in range(fewer + 1))
    return min(1.0, 2 * tail / 2**coins)


def sign_flip(differences: Sequence[float]) -> float:
    """Two-sided p-value of a mean difference over tasks: were the two models equally good, each task's difference could
    as well have the other sign. All patterns of signs, or where they are many, FLIPS random ones."""
    column = np.asarray([d for d in differences if d != 0.0], dtype=np.float64)
    if len(column) == 0:
        return 1.0
    seen = abs(math.fsum(column.tolist())) * (1 - 1e-12) - 1e-15  # ties count, also those that rounding parts
    if len(column) <= EXACT_FLIPS:
        patterns = (np.arange(2 ** len(column))[:, None] >> np.arange(len(column))) & 1
        return float(np.mean(np.abs((1 - 2 * patterns) @ column) >= seen))
    rng = np.random.default_rng(SEED)
    hits = 0
    for _ in range(10):  # a tenth at a time: memory
        signs = rng.integers(0, 2, size=(FLIPS // 10, len(column)), dtype=np.int8)
        hits += int(np.sum(np.abs((1.0 - 2.0 * signs) @ column) >= seen))
    return (1 + hits) / (1 + FLIPS)
