"""Scores and comparisons, with hand-made answers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from covey.evaluation.report import Report, flat_metrics, short_names
from covey.evaluation.scores import MCNEMAR, SIGN_FLIP, Answer, EvalSpec, compare, compare_all, compute_scores, sentence


def said(index: int, attempt: int, score: float | None, text: str = "", **more: object) -> Answer:
    fields = {"tokens": 10, "stop": "eos"} | more
    return Answer("m", "sums", "sampled", index, f"t{index}", attempt, {"exact": score}, text, **fields)  # type: ignore[arg-type]


def same(a: str, b: str) -> bool:
    return a == b


SPEC = EvalSpec("m", "sums", "sampled", 4, "exact", same, ks=(1, 2, 4))
ANSWERS = [
    *(said(0, i, score, text) for i, (score, text) in enumerate([(1, "7"), (0, "8"), (0, "8"), (1, "7")])),  # a tie
    *(said(1, i, score, text) for i, (score, text) in enumerate([(0, "1"), (1, "2"), (1, "2"), (1, "2")])),
    *(said(2, i, score, text) for i, (score, text) in enumerate([(0, "5"), (0, "5"), (1, "6"), (0, "")])),
]


def test_scores_by_hand() -> None:
    found = compute_scores(SPEC, ANSWERS)
    assert (found.tasks, found.answers) == (3, 12)
    assert found.pass_at[1].value == pytest.approx(6 / 12)
    # of six pairs those without a right answer: 1, 0 and 3
    assert found.pass_at[2].value == pytest.approx((5 / 6 + 1 + 3 / 6) / 3)
    assert found.pass_at[4].value == 1.0
    assert found.maj is not None and found.maj.value == pytest.approx(2 / 3)  # 7 was seen first, 2 is right, 5 is not
    assert found.average == found.pass_at[1]
    assert found.rewards == {"exact": 0.5} and found.failures == {}


def test_failed_answers_are_counted_and_excluded() -> None:
    failed = [replace(ANSWERS[1], failure="timeout", message="late", rewards={}), said(2, 3, None)]
    found = compute_scores(SPEC, [ANSWERS[0], failed[0], *ANSWERS[2:11], failed[1]])
    assert found.failures == {"timeout": 1, "unscored": 1} and found.example == "late"
    assert found.answers == 10
    # three answers each are left of two tasks: 2 of 3 and 1 of 3 right; 3 of 4 of the other
    assert found.pass_at[1].value == pytest.approx((2 / 3 + 3 / 4 + 1 / 3) / 3)
    assert found.pass_at[4].value == 1.0  # only of the task that still has four


def test_without_scored_answers_there_are_no_scores() -> None:
    found = compute_scores(SPEC, [replace(answer, failure="judge", rewards={}) for answer in ANSWERS])
    assert (found.tasks, found.average, found.maj, found.pass_at, found.lengths) == (0, None, None, {}, None)
    assert "–" in Report([found], [], "covey eval m").as_markdown()


def test_the_threshold_decides_what_is_right_and_the_mean_is_of_the_rewards() -> None:
    spec = EvalSpec("m", "qa", "greedy", 1, "exact", threshold=0.5)
    found = compute_scores(spec, [said(0, 0, 0.5), said(1, 0, 0.4), said(2, 0, 2.0)])
    assert found.pass_at[1].value == pytest.approx(2 / 3)
    assert found.average is not None and found.average.value == pytest.approx(2.9 / 3)
    assert found.maj is None
    assert "mean reward" in Report([found], [], "covey eval m").as_markdown()


def test_lengths() -> None:
    answers = [
        said(i, 0, 0.0, tokens=tokens, stop="length" if tokens > 9 else "eos") for i, tokens in enumerate(range(11))
    ]
    found = compute_scores(SPEC, answers).lengths
    assert found is not None
    assert (found.mean, found.median, found.p90, found.truncated) == (5, 5, 9, pytest.approx(1 / 11))


def test_scores_have_the_names_that_a_run_logs() -> None:
    metrics = flat_metrics([compute_scores(SPEC, ANSWERS)])
    assert metrics == {
        "eval/sampled/exact": 0.5,
        "eval/sampled/length_mean": 10.0,
        "eval/sampled/truncated": 0.0,
        "eval/accuracy": 0.5,
    }


# -- Comparisons -----------------------------------------------------------------------------------------------------

GREEDY = EvalSpec("a", "sums", "greedy", 1, "exact")
OTHER = replace(GREEDY, model="b")


def verdicts(text: str) -> list[Answer]:
    return [said(i, 0, float(letter == "1")) for i, letter in enumerate(text) if letter != " "]


def test_one_verdict_per_task_is_compared_by_mcnemar() -> None:
    """Two tasks only the first solves, seven only the second: p = 2·(1 + 9 + 36)/2⁹."""
    (found,) = compare(GREEDY, OTHER, verdicts("110000000111"), verdicts("001111111111"))
    assert (found.test, found.first_only, found.second_only, found.tasks) == (MCNEMAR, 2, 7, 12)
    assert found.p == pytest.approx(2 * 46 / 512)
    assert found.difference.value == pytest.approx(5 / 12)
    assert "p = 0.180" in sentence(found, {"a": "A", "b": "B"})


def test_only_tasks_that_both_answered_are_compared() -> None:
    (found,) = compare(GREEDY, OTHER, verdicts("11  00"), verdicts("1 1100"))
    assert found.tasks == 3 and found.first_value == pytest.approx(1 / 3)
    assert compare(GREEDY, OTHER, verdicts("1 "), verdicts(" 1")) == []


def test_several_answers_are_compared_by_sign_flips() -> None:
    """Five tasks, 4 of 4 against 3 of 4 each: all five signs alike, p = 2/2⁵."""
    ours = [said(i, a, float(a != 0)) for i in range(5) for a in range(4)]
    theirs = [said(i, a, 1.0) for i in range(5) for a in range(4)]
    (found,) = compare(SPEC, replace(SPEC, model="b"), ours, theirs)
    assert found.test == SIGN_FLIP and found.p == pytest.approx(2 / 32)
    assert found.difference.value == pytest.approx(0.25)


def test_mean_rewards_are_compared_too() -> None:
    found = compare(GREEDY, OTHER, [said(0, 0, 0.2), said(1, 0, 0.4)], [said(0, 0, 0.5), said(1, 0, 0.9)])
    assert [one.metric for one in found] == ["pass@1", "avg@1"]
    assert found[1].difference.value == pytest.approx(0.4) and found[1].p == pytest.approx(2 / 4)


def test_every_model_is_compared_with_the_first_on_the_same_tasks() -> None:
    specs = [GREEDY, OTHER, replace(GREEDY, model="c"), replace(OTHER, task="other")]
    found = compare_all(specs, {spec.key: verdicts("10") for spec in specs})
    assert [(one.first, one.second, one.task) for one in found] == [("a", "b", "sums"), ("a", "c", "sums")]
    assert "do not differ" in sentence(found[0], {"a": "A", "b": "B"})


def test_short_names() -> None:
    assert short_names(["runs/x/a", "runs/y/a"]) == {"runs/x/a": "x/a", "runs/y/a": "y/a"}
    assert short_names(["org/model"]) == {"org/model": "org/model"}
    assert short_names(["/x/a", "y/a"]) == {"/x/a": "/x/a", "y/a": "y/a"}


def test_the_interval_of_a_difference_of_shares_ends_at_one() -> None:
    (found,) = compare(GREEDY, OTHER, verdicts("000000"), verdicts("111110"))
    assert found.difference.value == pytest.approx(5 / 6) and found.difference.high == 1.0
    (found,) = compare(GREEDY, OTHER, verdicts("111110"), verdicts("000000"))
    assert found.difference.low == -1.0


def test_a_single_task_has_no_interval() -> None:
    (found,) = compare(GREEDY, OTHER, verdicts("0"), verdicts("1"))
    assert found.difference.high == math.inf and "no interval from a single task" in sentence(
        found, {"a": "A", "b": "B"}
    )
