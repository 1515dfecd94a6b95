"""The small exact algebra: identities, inequalities, and numbers checked against floating point."""

from __future__ import annotations

import cmath
import random

import pytest

from covey.rewards.math.algebra import NotAlgebra, Ratio, parse


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\frac{1}{1+\sqrt{2}}", r"\sqrt{2}-1"),
        (r"3\sqrt{12}", r"6\sqrt{3}"),
        (r"\frac{\sqrt{3}}{3}", r"1/\sqrt{3}"),
        (r"\sqrt{2}\sqrt{3}", r"\sqrt6"),
        (r"\sqrt[3]{54}", r"3\sqrt[3]{2}"),
        (r"\sqrt{\frac{3}{4}}", r"\frac{\sqrt{3}}{2}"),
        ("8^{2/3}", "4"),
        ("(x+1)^2", "x^2+2x+1"),
        (r"\frac{x^2-1}{x-1}", "x+1"),
        ("x^{-1}", r"\frac{1}{x}"),
        (r"\sqrt{x}\sqrt{x}", "x"),
        ("x_1+x_{2}", "x_2+x_{1}"),
        ("i^2", "-1"),
        ("i^7", "-i"),
        (r"\frac{1}{1+i}", r"\frac{1-i}{2}"),
        (r"\sqrt{-4}", "2i"),
        (r"1\frac{4}{5}", "1.8"),
        (r"-1\frac{4}{5}", "-9/5"),
        (r"2\frac{4}{3}", "8/3"),
        (r"2\frac{x}{3}", r"\frac{2x}{3}"),
        (r"\frac12", ".5"),
        (r"\frac{270}7", "270/7"),
        (r"0.\overline{3}", "1/3"),
        (r"0.1\overline{6}", "1/6"),
        ("-2^2", "-4"),
        ("(-2)^2", "4"),
        ("--3", "3"),
        ("2^-1", "0.5"),
        ("1.5*10^3", "1500"),
        ("1/2x", "x/2"),
        (r"\frac{1}{2}\pi", r"\frac{\pi}{2}"),
        (r"\sqrt0", "0"),
        ("3.", "3"),
    ],
)
def test_equal(one: str, other: str) -> None:
    assert parse(one) == parse(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [(r"\sqrt{2}", "1.41421356"), ("x", "y"), ("x_1", "x_2"), ("2x", "x^2"), (r"\pi", "3.14"), ("i", "-i"), ("0", "1")],
)
def test_not_equal(one: str, other: str) -> None:
    assert parse(one) != parse(other)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1/0",
        "1/(x-x)",
        r"\sin{x}",
        "2^x",
        r"\sqrt{x+1}",
        r"\sqrt{x^2}",  # |x|, not x
        r"\sqrt[4]{-1}",
        "4343_6",
        "2 3",
        "(1",
        "1)",
        "1+",
        "5!",
        "1,2",
        "9^{9^{9}}",
        "2^{100000}",
        "((x+y+z)^{20})^{20}",
        r"\sqrt{12345678901234567}",
        "(" * 299,
        "1+" * 400 + "1",
    ],
)
def test_unsupported_or_large_expressions_are_refused_quickly(text: str) -> None:
    with pytest.raises(NotAlgebra):
        parse(text)


def test_deep_nesting_does_not_overflow() -> None:
    assert parse("(" * 140 + "1" + ")" * 140) == parse("1")


def value(ratio: Ratio, **letters: float) -> complex:
    def size(total: dict[tuple[tuple[str, object], ...], object]) -> complex:
        result = 0j
        for monomial, factor in total.items():
            term = complex(float(factor))  # type: ignore[arg-type]
            for name, exponent in monomial:
                base = 1j if name == "i" else cmath.pi if name == "\\pi" else letters.get(name) or int(name)
                term *= base ** float(exponent)  # type: ignore[arg-type]
            result += term
        return result

    return size(ratio.top) / size(ratio.bottom)  # type: ignore[arg-type]


def test_values_agree_with_floating_point() -> None:
    """Random trees, written as LaTeX and computed beside it in complex numbers."""
    draw = random.Random(1)

    def tree(depth: int) -> tuple[str, complex]:
        if depth == 0:
            leaf = draw.choice(["3", "0.5", "x", r"\pi", "i", "7", r"\sqrt{12}", r"\sqrt[3]{5}", r"2\frac{1}{3}"])
            known = {"x": 1.7, r"\pi": cmath.pi, "i": 1j, r"\sqrt{12}": 12**0.5, r"\sqrt[3]{5}": 5 ** (1 / 3)}
            return leaf, complex(known[leaf] if leaf in known else 7 / 3 if "frac" in leaf else float(leaf))
        (a, x), (b, y) = tree(depth - 1), tree(depth - 1)
        kind = draw.randrange(5)
        if kind == 0:
            return f"({a})+{b}" if not b.startswith("-") else f"{a}+({b})", x + y
        if kind == 1:
            return f"{a}-({b})", x - y
        if kind == 2:
            return f"({a})({b})", x * y
        if kind == 3 and abs(y) > 1e-3:
            return rf"\frac{{{a}}}{{{b}}}", x / y
        return f"({a})^2", x * x

    done = 0
    for _ in range(300):
        text, expected = tree(draw.randint(1, 3))
        try:
            result = parse(text)
        except NotAlgebra:
            continue  # over a cap
        if abs(expected) < 1e9:
            assert value(result, x=1.7) == pytest.approx(expected, rel=1e-6, abs=1e-6), text
            done += 1
    assert done > 200
