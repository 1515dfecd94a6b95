"""The statistics of evaluation, against enumeration, hand-made numbers and simulation."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest

from covey.evaluation.statistics import majority, mcnemar, mean, pass_at_k, powers_up_to, share, sign_flip, student

# -- pass@k ----------------------------------------------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            verdicts = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(verdicts, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_of_many_answers_does_not_overflow() -> None:
    exact = 1 - Fraction(math.comb(9_900, 1000), math.comb(10_000, 1000))
    assert pass_at_k(10_000, 100, 1000) == pytest.approx(float(exact), rel=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    """Over all ways that n answers of chance 0.3 can come out, its mean is 1 − 0.7^k."""
    n, chance = 6, 0.3
    for k in range(1, n + 1):
        expected = sum(math.comb(n, c) * chance**c * (1 - chance) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
        assert expected == pytest.approx(1 - 0.7**k, abs=1e-12)


def test_the_k_are_powers_of_two_and_n() -> None:
    assert [powers_up_to(n) for n in (1, 2, 3, 8, 10)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8), (1, 2, 4, 8, 10)]


# -- maj@n -----------------------------------------------------------------------------------------------------------


def same(a: str, b: str) -> bool:
    return a.lower() == b.lower()


def test_the_majority_is_the_most_frequent_answer() -> None:
    assert majority(["7", "8", "8", "9"], same) == 1
    assert majority(["x", "Y", "y", "y", "X"], same) == 1


def test_ties_go_to_the_answer_seen_first() -> None:
    assert majority(["9", "8", "8", "9"], same) == 0


def test_empty_answers_do_not_vote() -> None:
    assert majority(["", "", "", "8"], same) == 3
    assert majority(["", ""], same) is None


# -- intervals -------------------------------------------------------------------------------------------------------


def test_one_verdict_per_task_gives_wilsons_interval() -> None:
    """It holds the p at which the observed share is exactly Z standard errors away: (p̂ − p)² = Z² p(1−p)/T."""
    found = share([1.0] * 7 + [0.0] * 13, answers=20)
    assert found.value == pytest.approx(0.35)
    for p in (found.low, found.high):
        assert (0.35 - p) ** 2 == pytest.approx(1.959963984540054**2 * p * (1 - p) / 20, abs=1e-12)


def test_an_interval_never_shrinks_to_a_point_because_all_is_right_or_wrong() -> None:
    none, every = share([0.0] * 10, answers=160), share([1.0] * 10, answers=160)
    assert none.low == 0.0 and none.high == pytest.approx(0.2775, abs=1e-4)  # Z²/(T + Z²)
    assert every.high == 1.0 and every.low == pytest.approx(1 - none.high)


def test_equal_answers_within_a_task_count_once() -> None:
    """Eight answers per task, all alike, are no more evidence than one of them."""
    verdicts = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert share(verdicts, answers=48) == share(verdicts, answers=6)


def _tasks(rng: random.Random, tasks: int, n: int) -> list[float]:
    """Shares of right answers where tasks differ in difficulty: chances of Beta(2, 3), whose mean is 0.4."""
    return [
        sum(rng.random() < chance for _ in range(n)) / n for chance in (rng.betavariate(2, 3) for _ in range(tasks))
    ]


@pytest.mark.parametrize(("tasks", "n"), [(40, 1), (40, 4), (30, 16)])
def test_intervals_of_shares_hold_the_truth_95_times_in_100(tasks: int, n: int) -> None:
    rng = random.Random(1)
    found = [share(_tasks(rng, tasks, n), tasks * n) for _ in range(2000)]
    covered = sum(e.low <= 0.4 <= e.high for e in found) / len(found)
    assert 0.93 <= covered <= 0.97


def test_intervals_of_means_hold_the_truth_95_times_in_100() -> None:
    rng = random.Random(2)
    found = [mean([rng.uniform(-1.0, 2.0) for _ in range(12)]) for _ in range(4000)]
    covered = sum(e.low <= 0.5 <= e.high for e in found) / len(found)
    assert covered == pytest.approx(0.95, abs=0.01)


def test_the_interval_of_a_mean_by_hand() -> None:
    """1, 2, 3, 4, 5: mean 3, variance 2.5, standard error √0.5, and 2.776 of them either side."""
    found = mean([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.low, found.high) == pytest.approx((3 - 2.776 * math.sqrt(0.5), 3 + 2.776 * math.sqrt(0.5)), rel=0.01)
    alone = mean([3.0])
    assert (alone.low, alone.high) == (-math.inf, math.inf)


def test_students_quantiles_are_those_of_the_tables() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 6: 2.447, 10: 2.228, 30: 2.042, 1000: 1.962}
    for freedom, quantile in table.items():
        assert student(freedom) == pytest.approx(quantile, rel=0.01 if freedom < 6 else 0.001)


# -- tests -----------------------------------------------------------------------------------------------------------


def test_mcnemar_by_hand() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(0, 5) == pytest.approx(2 / 32)  # five heads or five tails
    assert mcnemar(1, 9) == pytest.approx(2 * (1 + 10) / 1024)
    assert mcnemar(9, 1) == mcnemar(1, 9)
    assert mcnemar(4, 4) == 1.0


def test_sign_flips_of_verdicts_are_mcnemars_test() -> None:
    for won, lost in ((5, 0), (9, 1), (6, 4), (3, 3)):
        assert sign_flip([1.0] * won + [-1.0] * lost + [0.0] * 20) == pytest.approx(mcnemar(won, lost))


def test_sign_flips_by_hand() -> None:
    """±0.1 ± 0.3 ± 0.6 are the eight sums ±0.2, ±0.4, ±0.8 and ±1.0."""
    assert sign_flip([0.1, 0.3, 0.6]) == pytest.approx(2 / 8)
    assert sign_flip([-0.1, 0.3, 0.6]) == pytest.approx(4 / 8)  # ±0.8 and ±1.0
    assert sign_flip([0.1, -0.3, 0.6]) == pytest.approx(6 / 8)  # all but ±0.2
    assert sign_flip([]) == sign_flip([0.0, 0.0]) == 1.0


def test_many_differences_are_sampled_with_the_exact_tests_result() -> None:
    assert sign_flip([1.0] * 21 + [-1.0] * 9) == pytest.approx(mcnemar(21, 9), abs=0.01)
    assert sign_flip([1.0] * 40) == 1 / 10_001
    values = np.random.default_rng(0).normal(0.3, 1.0, size=50).tolist()
    assert sign_flip(values) == sign_flip(values)


def test_p_values_of_equal_models_are_uniform() -> None:
    """Below 0.05 no more often than in one case of twenty, but for what 400 draws vary."""
    rng = random.Random(4)
    found = [sign_flip([rng.gauss(0, 1) for _ in range(10)]) for _ in range(400)]
    assert sum(p <= 0.05 for p in found) / len(found) == pytest.approx(0.05, abs=0.033)
