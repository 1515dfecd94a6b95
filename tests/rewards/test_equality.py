"""Which answers `math_verify` pays: pairs made by hand, and gold answers of real problems against each other."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import re
from pathlib import Path

import pytest

from covey.rewards.math import verify_process
from covey.rewards.math.algebra import Ratio
from covey.rewards.math.equality import Comparison, compare, equal
from covey.rewards.math.latex import Numeral, numeral, same_numeral
from covey.rewards.math.rewards import gold_texts
from tests.rewards.replies import score

NEEDS_MATH_VERIFY = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed (covey[math])"
)

WRONG = [
    # number bases
    *[("52_8", "52_{9}"), ("52_8", "52"), ("52_8", "42"), ("52_8", "25_8"), ("-37_8", "37_8"), ("24_{10}", "24_9")],
    *[("1011_2", "1011_3"), ("861_{12}", "861_{1}"), ("9", "9_8"), ("52_8", "52_8+0"), ("101_2,11_2", "101_2,11_3")],
    # relations, negations and marks in front of the answer
    *[
        (r"\frac{1}{6}", rf"{mark}\frac{{1}}{{6}}")
        for mark in (r"\neq ", r"\not=", r"\ge ", r"\sim ", r"\to ", r"\neg ")
    ],
    *[(r"\frac{1}{6}", rf"{mark}{{\frac{{1}}{{6}}}}") for mark in (r"\hat", r"\vec", r"\overline", r"\arg")],
    *[("5", "x>5"), ("5", r"x\ne 5"), ("5", "x != 5"), ("5", "x≠5"), ("x=5", r"x\ne5"), ("x=5", "2x=5"), ("5", "6=5")],
    *[("x>5", "x<5"), ("x>5", r"x\ge5"), ("x>5", "5"), ("5", r"\text{not }5"), (r"m \neq 1", "m=1")],
    # structure
    *[("(3,5)", "-((3,5))"), ("(3,5)", "-(3,5)"), ("(3,5)", "x > (3,5)"), ("(3,5)", "2(3,5)"), ("(3,5)", "(5,3)")],
    *[(r"(\frac{1}{2},\frac{3}{4})", rf"{mark}(\frac{{1}}{{2}},\frac{{3}}{{4}})") for mark in ("-", "x>", r"\ne ")],
    *[("(3,5)", "5,3"), ("(3,5)", r"\{3,5\}"), (r"\{3,5\}", "(3,5)"), ("(3,5)", "[3,5]"), ("3,5", "[3,5]")],
    *[("(3,5)", "3+5i"), ("(1,2)", r"x\notin(1,2)"), (r"(0,9)\cup(9,36)", r"(0,9)\cap(9,36)")],
    *[(r"(0,9)\cup(9,36)", r"(0,9)\cup(9,36)\text{ hundred}"), ("(5,5)", "5"), ("5", "(5,5)")],
    *[(r"\begin{pmatrix}1\\2\end{pmatrix}", rf"{mark}\begin{{pmatrix}}1\\2\end{{pmatrix}}") for mark in "-2"],
    # how often
    *[("1,2", "1,2,2"), ("1,1,2", "1,2,2"), ("-1,3,3", "-1,-1,3"), ("-1,3,3", "-1,3"), ("5", "5,5"), ("5", r"\{5,5\}")],
    *[("(1,2),(3,4)", "(1,2),(3,4),(3,4)"), (r"\sqrt{2},\sqrt{3}", r"\sqrt{3},\sqrt{2},\sqrt{2}"), ("5", r"\pm5")],
    *[("x=1,y=2", "x=2,y=1"), ("x=1,y=2", "y=1,x=2"), ("(1,200)", "1200")],
    # words behind a number
    *[("5", f"5 {word}") for word in ("hundred", "dozen", "squared", "cubed", "thirds", "factorial", "twelve")],
    *[("5", rf"5\text{{ {word}}}") for word in ("hundred", "dozen", "squared", "million", "or less", "hundred twenty")],
    *[("5", "5 or more"), ("12 inches", "12 Feet")],
    *[("x^2+1", "x^2+1 hundred"), ("5", "5 hundred thousand"), ("12 feet", "12 feet squared")],
    # letters and dots
    *[("A", "A'"), ("f(x)=2x", "f'(x)=2x"), (r"1 \frac12", r"1\cdot\frac12"), ("5", r"5\ldots")],
]
RIGHT = [
    *[
        ("52_8", "52_{8}"),
        ("52_8", r"52_{\text{eight}}"),
        ("52_8", "(52)_8"),
        ("52_8", "52 base 8"),
        ("-37_8", "-37_8"),
    ],
    *[("52_8", "42 = 52_8"), ("24_{10}", "24"), ("110111", "110111_2"), (r"\text{A5}_{11}", "A5_{11}")],
    *[("861_{12}", "861_12"), ("(1001)_2, (3021)_4", "3021_4, 1001_2")],
    *[("25", "5 squared"), ("500", "5 hundred"), ("60", "5 dozen"), ("60", "5 dozen eggs"), ("0.4", "2 fifths")],
    *[
        ("2 million", "2 million dollars"),
        ("12 square feet", "12 feet squared"),
        ("5", "5 more apples"),
        ("3", "3 quarters"),
    ],
    *[("3", "3 groups of ten"), ("9", "9 square"), (r"\frac32", r"1 \frac12"), (r"\frac{9}{4}", r"2\frac14")],
    *[("5", "2+3=5"), ("5", "x=y=5"), ("5", "x=2+3=5"), ("0.33", "1/3=0.33"), (r"\frac{1}{6}", r"P(A)=\frac{1}{6}")],
    *[("3.14", r"\approx 3.14"), ("3.14", r"x \approx 3.14"), ("2x", "f'(x)=2x"), ("120", "5!=120")],
    *[("10,000 and 20,000", "20000, 10000"), ("1,234", "1234"), ("10,000,20,000", "20000,10000")],
    *[("(3,5)", "((3,5))"), ("(3,5)", "3,5"), ("3,5", "(5,3)"), ("(3,5)", "x=3,y=5"), ("(x,y)=(3,5)", "(3,5)")],
    *[("x=1,y=2", "y=2,x=1"), ("x=1,y=2", "(1,2)"), ("5", r"\{5\}"), (r"(0,9)\cup(9,36)", r"((9,36)\cup(0,9))")],
    *[("x>5", "5<x"), (r"\text{(B)}", "B"), (r"\{1,2\}", r"A=\{2,1\}")],
]
ONLY_WITH_MATH_VERIFY = [
    *[("{(P)}", r"\text{(P)}"), ("({H})", r"(\text{H})"), ("{(E)},", r"\text{(E)},")],  # as one data set has them
    *[("x>5", r"(5,\infty)"), (r"120 < n \leq 130", "(120,130]"), (r"(-\infty,\infty)", r"(-\infty,0)\cup[0,\infty)")],
    *[(r"(\sin 2x,1)", r"(2\sin x\cos x,1)"), (r"1,\sin 2x", r"2\sin x\cos x,1"), ("x^2+y^2=1", "y^2+x^2-1=0")],
    *[(r"\begin{pmatrix}\sin 2x\\1\end{pmatrix}", r"\begin{pmatrix}2\sin x\cos x\\1\end{pmatrix}")],
]


@NEEDS_MATH_VERIFY
@pytest.mark.parametrize(("gold", "reply"), WRONG)
def test_wrong_answers_are_not_equal(gold: str, reply: str) -> None:
    assert score("math_verify", rf"\boxed{{{reply}}}", gold)["math_verify"] == 0


@pytest.mark.parametrize(("gold", "reply"), [*RIGHT, *[(gold, gold) for gold, _ in WRONG]])
def test_correct_answers_are_equal(gold: str, reply: str) -> None:
    if (gold, reply) == ("x>5", "5<x"):
        assert equal(gold, reply) is None
    else:
        assert score("math_equal", rf"\boxed{{{reply}}}", gold)["math_equal"] == 1


@NEEDS_MATH_VERIFY
@pytest.mark.parametrize(("gold", "reply"), [*ONLY_WITH_MATH_VERIFY, ("x>5", "5<x")])
def test_pairs_decided_by_math_verify(gold: str, reply: str) -> None:
    assert equal(gold, reply) is None
    assert score("math_verify", rf"\boxed{{{reply}}}", gold)["math_verify"] == 1


def test_only_undecided_parts_are_queried() -> None:
    pair = (r"\sin2x", r"2\sin x\cos x")
    gold, reply = r"(\sin 2x, 1)", r"(2\sin x\cos x, 1)"
    assert compare(gold, reply, {}) == (None, [pair])
    assert compare(gold, reply, {pair: True}) == (True, [])
    assert compare(gold, reply, {pair: False}) == (False, [])
    assert compare(gold, r"(2\sin x\cos x, 2)", {}) == (False, [])  # the other part decides


def test_undecided_lists_are_matched_one_to_one() -> None:
    """Two gold items that both equal the first item of the reply are not paid by it twice."""
    gold, reply = r"\sin a,\sin b", r"\cos a,\cos b"
    verdict, pairs = compare(gold, reply, {})
    assert verdict is None and sorted(pairs) == [(f"\\sin {g}", f"\\cos {r}") for g in "ab" for r in "ab"]
    assert compare(gold, reply, dict.fromkeys(pairs, True))[0] is True
    first = {pair: pair[1] == r"\cos a" for pair in pairs}
    assert compare(gold, reply, first)[0] is False


@pytest.mark.parametrize("spelling", ["{}", "{}.0", "{}/1"])
def test_a_long_list_is_not_compared_each_with_each(monkeypatch: pytest.MonkeyPatch, spelling: str) -> None:
    compared = 0
    plain = Ratio.__eq__

    def counted(self: Ratio, other: object) -> bool:
        nonlocal compared
        compared += 1
        return plain(self, other)

    monkeypatch.setattr(Ratio, "__eq__", counted)
    gold = ",".join(map(str, range(300)))
    reversed_ = ",".join(spelling.format(one) for one in reversed(range(300)))
    assert equal(gold, reversed_) is True
    assert equal(gold, reversed_.replace("7", "8")) is False
    assert compared < 1_000


def test_a_long_list_of_roots_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with each, 283 roots in another spelling and the opposite order would be 40,000 comparisons."""
    compared = 0
    plain = Comparison.same

    def counted(self: Comparison, gold: str, reply: str) -> bool | None:
        nonlocal compared
        compared += 1
        return plain(self, gold, reply)

    monkeypatch.setattr(Comparison, "same", counted)
    roots = [rf"\sqrt{{{one}}}" for one in range(2, 302) if round(one**0.5) ** 2 != one]
    spelled = [f"1{root}" for root in roots]
    assert equal(",".join(roots), ",".join(reversed(spelled))) is False
    assert compared < 5_000
    assert equal(",".join(roots), ",".join(spelled)) is True
    assert equal(",".join(roots[:30]), ",".join(reversed(spelled[:30]))) is True


def test_deep_nesting_ends() -> None:
    nested = "1"
    for _ in range(400):
        nested = f"(2,{nested})"
    assert equal(nested, nested) is True
    assert equal(nested, nested.replace("(2,1)", "(2,1.0)")) is False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("52_8", Numeral("52", 8)),
        ("52_{12}", Numeral("52", 12)),
        ("-007_8", Numeral("-7", 8)),
        ("0_2", Numeral("0", 2)),
        (r"52_{\text{five}}", None),  # base five has no digit 5
        (r"52_{\text{six}}", Numeral("52", 6)),
        ("FF_{16}", Numeral("FF", 16)),
        ("12_2", None),
        ("12_1", None),
        ("12_{37}", None),
        ("x_2", None),
        ("52", None),
    ],
)
def test_numbers_with_a_base(text: str, expected: Numeral | None) -> None:
    assert numeral(text) == expected


@pytest.mark.parametrize(
    ("gold", "reply", "verdict"),
    [
        *[("5", "2_3+3_4", False), ("2_3+3_4", "5", False), ("x_1", "x_2", None), ("52", "42", None)],
        *[
            ("52_8", "42", False),
            ("24_{10}", "24", True),
            ("24_8", "24", False),
            ("7", "7_8", True),
            ("7", "8_9", False),
        ],
    ],
)
def test_a_base_on_either_side(gold: str, reply: str, verdict: bool | None) -> None:
    assert same_numeral(gold, reply) is verdict


def test_sides_of_an_equation() -> None:
    assert equal("100", "104=100") is True  # rounded
    assert equal("100", "106=100") is False
    assert equal("0.1", "0.14=0.1") is True
    assert equal("0.1", "0.2=0.1") is False


# -- gold answers of real problems -------------------------------------------------------------------------------------

SETS = ("math_eval/math500", "math_eval/amc23", "math_eval/aime24", "math_train/math_train")


def golds_in(shared: Path) -> list[str]:
    rows = [json.loads(line) for name in SETS for line in (shared / "data" / f"{name}.jsonl").open()]
    return [gold for gold in dict.fromkeys(str(row["answer"]).strip() for row in rows) if gold]


async def _all(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those that are paid, with math-verify for what is open."""
    from covey.rewards.math.rewards import _verify

    return [(gold, reply) for gold, reply in pairs if await _verify(gold, reply, 2.0)]


def test_every_gold_answer_equals_itself(shared: Path) -> None:
    for gold in golds_in(shared):
        for text in (gold, gold.replace(r"\frac", r"\dfrac"), re.sub(r"(?<=[+=])", " ", gold)):
            assert equal(gold_texts(gold)[0], text) is True, (gold, text)


@NEEDS_MATH_VERIFY
def test_gold_answers_of_other_problems_are_not_equal(shared: Path) -> None:
    draw = random.Random(11)
    golds = golds_in(shared)
    formulas = [gold for gold in golds if not re.fullmatch(r"-?[\d.]+", gold)]
    pairs = [(draw.choice(formulas), draw.choice(golds)) for _ in range(120)]
    assert asyncio.run(_all([(a, b) for a, b in pairs if a != b and not verify_process.wild(a)])) == []


@NEEDS_MATH_VERIFY
def test_gold_answers_with_added_text_are_not_equal(shared: Path) -> None:
    draw = random.Random(12)
    plain = [gold for gold in golds_in(shared) if not re.search(r"text|mbox|[<>=]|\\le|\\ge|^0$|%|_", gold)]
    around = (
        r"\neq {}",
        "x>{}",
        r"\text{{not }}{}",
        "({0},{0})",
        "{0},{0}",
        "{} hundred",
        r"{}\text{{ dozen}}",
        "{0}_9,{0}",
    )
    chosen = draw.sample(plain, 60)
    pairs = [(gold, draw.choice(around).format(gold)) for gold in chosen for _ in range(3)]
    assert asyncio.run(_all(pairs)) == []
