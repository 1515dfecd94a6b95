"""Estimates, confidence intervals and tests from n answers per task. Pure mathematics, no I/O.

    pass@k    1 − C(n−c, k) / C(n, k)              if c of n answers are right; unbiased (Chen et al. 2021)
    maj@n     the most frequent of the n answers
    interval  95 %, over tasks: answers to one task are not independent of each other
    tests     of two models on the same tasks: exact McNemar for verdicts, sign flips for means

Every function is deterministic: random sign flips have a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959963984540054  # quantile of the normal distribution: 95 % lie within ± Z
EXACT_FLIPS = 14  # up to this many differences, all 2^T sign patterns are enumerated
FLIPS = 10_000  # random sign patterns otherwise
SEED = 20_240_229


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % confidence interval."""

    value: float
    low: float
    high: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that at least one of k answers is right, drawn from n of which c are.

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
    """The index of the first occurrence of the most frequent answer; ties go to the one seen first.

    An answer counts towards the first earlier one that it is the `same` as. Empty answers do not vote; None: no votes.
    """
    votes: dict[int, int] = {}  # index of the first occurrence → votes
    for index, answer in enumerate(answers):
        if answer:
            first = next((first for first in votes if same(answers[first], answer)), index)
            votes[first] = votes.get(first, 0) + 1
    return max(votes, key=lambda first: votes[first]) if votes else None


def share(values: Sequence[float], answers: int) -> Estimate:
    """The mean of one value in [0, 1] per task, with Wilson's interval.

    The number of trials is the effective one, p(1−p)/SE², with the standard error over tasks. For one verdict per task
    that is the number of tasks (the plain Wilson interval); if the values of all tasks are near p it is larger, at most
    the number of answers. For p = 0 or 1 it is the number of tasks.
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
    return Estimate(p, *wilson(p, trials))


def wilson(p: float, trials: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share p."""
    centre = (p + Z**2 / (2 * trials)) / (1 + Z**2 / trials)
    half = Z / (1 + Z**2 / trials) * math.sqrt(p * (1.0 - p) / trials + Z**2 / (4 * trials**2))
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))


def mean(values: Sequence[float]) -> Estimate:
    """The mean of one value per task on any scale, with Student's interval over tasks (infinite for one task)."""
    T = len(values)
    assert T > 0
    centre = math.fsum(values) / T
    if T == 1:
        return Estimate(centre, -math.inf, math.inf)
    error = math.sqrt(math.fsum((x - centre) ** 2 for x in values) / (T - 1) / T)
    half = student(T - 1) * error
    return Estimate(centre, centre - half, centre + half)


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution.

    Exact for 1 and 2 degrees of freedom, else Fisher's expansion in 1/freedom (error < 1 % from 3 on, < 0.1 % from 6).
    """
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
    """Exact two-sided p-value, from the numbers of tasks that only the first and only the second model solves.

    If the models were equally good, each of these tasks would be a fair coin toss.
    """
    coins, fewer = first_only + second_only, min(first_only, second_only)
    tail = sum(math.comb(coins, i) for i in range(fewer + 1))
    return min(1.0, 2 * tail / 2**coins)


def sign_flip(differences: Sequence[float]) -> float:
    """Two-sided p-value of a mean difference over tasks.

    If the models were equally good, each difference could as well have the other sign. Enumerates all sign patterns, or
    samples FLIPS of them.
    """
    column = np.asarray([d for d in differences if d != 0.0], dtype=np.float64)
    if len(column) == 0:
        return 1.0
    observed = abs(math.fsum(column.tolist())) * (1 - 1e-12) - 1e-15  # ties count, despite rounding
    if len(column) <= EXACT_FLIPS:
        patterns = (np.arange(2 ** len(column))[:, None] >> np.arange(len(column))) & 1
        return float(np.mean(np.abs((1 - 2 * patterns) @ column) >= observed))
    rng = np.random.default_rng(SEED)
    hits = 0
    for _ in range(10):  # in ten chunks, to save memory
        signs = rng.integers(0, 2, size=(FLIPS // 10, len(column)), dtype=np.int8)
        hits += int(np.sum(np.abs((1.0 - 2.0 * signs) @ column) >= observed))
    return (1 + hits) / (1 + FLIPS)
