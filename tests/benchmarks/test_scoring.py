"""The checks of benchmarks/scoring.py: what they make wrong is wrong, and on real data all is as it should be."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

MATH_VERIFY = importlib.util.find_spec("math_verify") is not None


@pytest.mark.parametrize(
    ("test", "wrong"),
    [
        ("assert f(1) == 2", "assert f(1) == 5"),
        ("assert f(1) == -0.5, 'why'", "assert f(1) == 1.0, 'why'"),
        ("assert f('a') == 'b'", "assert f('a') == 'b?'"),
        ("assert f() == [1, (2, True)]", "assert f() == [1, (2, False)]"),
        ("assert f() == {}", "assert f() == {'?': 0}"),
        ("assert f() is None", "assert f() is 0"),
        ("assert abs(f(2) - 0.5) < 1e-6", "assert abs(f(2) - 2.0) < 1e-06"),
        ("assert math.isclose(f(), 2.0, rel_tol=0.001)", "assert math.isclose(f(), 5.0, rel_tol=0.001)"),
        ("assert f(1)", "assert not f(1)"),
        ("assert f(1) == g(2)", "assert not f(1) == g(2)"),
        ("assert set(f()) == set([1])", "assert not set(f()) == set([1])"),
        ("assert True\nassert f() == 0\nassert f() == 0", "assert True\nassert f() == 1\nassert f() == 0"),
    ],
)
def test_a_test_made_wrong(test: str, wrong: str) -> None:
    from kit.perturb import wrong_test

    assert wrong_test(test) == wrong


def test_answers_made_wrong() -> None:
    from kit.perturb import wrong_answers

    found = wrong_answers([r"\frac{3}{7}", "(1,2]", "2x+1", r"\text{even}", "0"], 6)
    assert set(found) <= {
        ("number", r"\frac{3}{7}", r"\frac{3}{8}"),
        ("number", "(1,2]", "(2,2]"),
        ("number", "2x+1", "3x+1"),
        ("number", "0", "1"),
        ("sign", r"\frac{3}{7}", r"-\frac{3}{7}"),
        ("ends", "(1,2]", "(2,1]"),
        ("coefficient", "2x+1", "2(3x)+1"),
    }
    assert {how for how, _, _ in found} == {"number", "sign", "ends", "coefficient"}


def exceptions(name: str, data: Path, sample: int | None = None) -> tuple[list[str], int]:
    from kit.scoring_checks import CHECKS

    rows = list(CHECKS[name](data, sample))
    assert all(row.right == row.tried - len(row.exceptions) for row in rows)
    return [text.split(":")[0] for row in rows for text in row.exceptions], sum(row.tried for row in rows)


# Rows that cannot be right, and why: docs/scoring.md.
DAMAGED = [38, 407, 2224, 5329, 5331, 5689, 6490, 6613, 6743, 7138, 7215, 7284, 7431, 7440]
KNOWN = {
    "math": sorted(f"math_train {row}" for row in DAMAGED),
    "bfcl": ["live_simple_106-63-0", "live_simple_112-68-0", "live_multiple_862-181-3", "live_multiple_964-207-0"],
}


@pytest.mark.skipif(not MATH_VERIFY, reason="math-verify is not installed (covey[math])")
@pytest.mark.parametrize(
    ("name", "sample", "tried"), [("gsm8k", 200, 600), ("math", 100, 900), ("rlla", None, 151), ("bfcl", 50, 4000)]
)
def test_gold_answers_and_wrong_ones(shared: Path, name: str, sample: int | None, tried: int) -> None:
    wrong, count = exceptions(name, shared / "data", sample)
    assert set(wrong) <= set(KNOWN.get(name, ()))
    assert count >= tried


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k", "math", "code", "bfcl"])
def test_all_of_the_large_sets(shared: Path, name: str) -> None:
    assert exceptions(name, shared / "data")[0] == KNOWN.get(name, [])


def test_hostile_answers_are_as_many_as_said() -> None:
    from kit.scoring_speed import adversarial

    kinds: dict[str, Any] = {}
    for kind, _, reply in adversarial():
        kinds.setdefault(kind, []).append(reply)
    assert len(kinds) == 20
    assert max(len(reply) for replies in kinds.values() for reply in replies) > 2_000_000
