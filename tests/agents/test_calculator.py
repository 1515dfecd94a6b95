"""The calculator, by hand, against exact fractions, and against hostile input."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest

from covey.agents.tools.calculator import MAX_DEPTH, MAX_DIGITS, ExpressionError, calculate, calculator
from covey.agents.tools.tool import ToolMistake


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.333333333333333"),
        ("2/3", "0.666666666666667"),
        ("1/3*3", "1"),
        ("10/4", "2.5"),
        ("7//2", "3"),
        ("-7//2", "-4"),
        ("7%3", "1"),
        ("-7 % 3", "2"),
        ("7.5 % 2", "1.5"),
        ("2**10", "1024"),
        ("2^3^2", "512"),
        ("-2**2", "-4"),
        ("(-2)**2", "4"),
        ("2**-2", "0.25"),
        ("4**0.5", "2"),
        ("8**(1/3)", "2"),
        ("--3", "3"),
        ("2 - -3", "5"),
        ("1,234 + 1,000,000.5", "1001234.5"),
        ("50%", "0.5"),
        ("15% of 80", "12"),
        ("200 * 10%", "20"),
        ("10% + 1", "1.1"),
        ("20 % 6", "2"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("1.5e3", "1500"),
        (".5 + 5.", "5.5"),
        ("sqrt(16)", "4"),
        ("sqrt(16/9) * 3", "4"),
        ("sqrt(2)", "1.4142135623731"),
        ("sqrt(2)**2", "2"),
        ("abs(-3.5)", "3.5"),
        ("round(2.5)", "3"),
        ("round(-2.5)", "-3"),
        ("round(1.005, 2)", "1.01"),
        ("round(1234.5, -2)", "1200"),
        ("round(2/3, 3)", "0.667"),
        ("min(1,234)", "1"),
        ("max(3, 1+1, 2)", "3"),
        ("max((1,234), 5)", "1234"),
        ("floor(-1.5)", "-2"),
        ("ceil(7/2)", "4"),
        ("log(1000)", "3"),
        ("log(8, 2)", "3"),
        ("log(1/9, 3)", "-2"),
        ("ln(e)", "1"),
        ("exp(0)", "1"),
        ("exp(1) - e", "0"),
        ("sin(pi)", "0"),
        ("cos(pi/2)", "0"),
        ("sin(pi/6)", "0.5"),
        ("cos(0)", "1"),
        ("tan(pi/4)", "1"),
        ("2*π", "6.28318530717959"),
        ("factorial(5)", "120"),
        ("3!!", "720"),
        ("-3!", "-6"),
        ("25!", "15511210043330985984000000"),
        ("1/10**20", "0.00000000000000000001"),
        ("10**20/3", "3.33333333333333e+19"),
        ("1/3/10**20", "3.33333333333333e-21"),
        ("123456789012345678901.5 * 2", "246913578024691357803"),
        ("2 + 2 =", "4"),
        ("(-1)**1000000001", "-1"),
        ("1**10**100", "1"),
    ],
)
def test_by_hand(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9**9**9", "more than 1000 digits"),
        ("9**9**9**9**9", "more than 1000 digits"),
        ("(1/9)**9**9", "more than 1000 digits"),
        ("1.0000001**100000000", "more than 1000 digits"),
        ("2.5**(9**99)", "more than 1000 digits"),
        ("e**9**99", "too large"),
        ("10**999 * 10**999", "more than 1000 digits"),
        ("1e1001", "more than 1000 digits"),
        ("1e-99999999999999999999", "more than 1000 digits"),
        ("factorial(10**9)", "more than 1000 digits"),
        ("factorial(factorial(20))", "more than 1000 digits"),
        ("5!!!", "more than 1000 digits"),
        ("1/0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0**-1", "division by zero"),
        ("sqrt(-1)", "no real square root"),
        ("(-8)**(1/3)", "fractional exponent"),
        ("log(0)", "positive number"),
        ("log(5, 1)", "base other than 1"),
        ("ln(-1)", "positive number"),
        ("tan(pi/2)", "no value"),
        ("exp(1000)", "too large"),
        ("factorial(2.5)", "whole number"),
        ("round(1, 0.5)", "whole number of digits"),
        ("round(1, 10**6)", "at most 100"),
        ("sqrt(1,234)", "write 1234"),
        ("sqrt", "needs parentheses"),
        ("sqrt()", "unexpected '\\)'"),
        ("1,23", "unexpected ','"),
        ("2(3)", "write \\* to multiply"),
        ("2 3", "write \\* to multiply"),
        ("(1 + 2", "not closed"),
        ("1 +", "ends too early"),
        ("", "ends too early"),
        (")", "unexpected '\\)'"),
        ("(" * 500 + "1" + ")" * 499, f"nested more than {MAX_DEPTH}"),
        ("2**" * 300 + "1", f"nested more than {MAX_DEPTH}"),
        ("sqrt(" * 150, f"nested more than {MAX_DEPTH}"),
        ("1+" * 5000 + "1", "longer than 1000"),
        ("١٢ + 1", "unexpected '١'"),
        ("1².5", "unexpected '²'"),
        ("(1).real", "unexpected '.'"),
        ("__import__('os').system('id')", 'unexpected "\'"'),
        ("abs.__class__", "unexpected '.'|needs parentheses"),
        ("open(1)", "unknown name 'open'"),
        ("x = 5", "unexpected '='"),
        ("[1,2][0]", "unexpected"),
        ("1 if 1 else 2", "write \\* to multiply"),
        ("lambda: 1", "unexpected ':'"),
        ("0x10", "write \\* to multiply"),
        ("1_000", "write \\* to multiply"),
    ],
)
def test_errors_say_why(expression: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        calculate(expression)


def test_a_thousand_digits_are_the_limit() -> None:
    assert calculate(f"10**{MAX_DIGITS - 1}") == "1" + "0" * (MAX_DIGITS - 1)
    assert len(calculate("449!")) <= MAX_DIGITS


def test_a_long_sum_is_not_deep() -> None:
    assert calculate("1+" * 499 + "1") == "500"
    assert calculate("-" * 999 + "1") == "-1"


def test_logarithms_of_numbers_beyond_the_range_of_floats() -> None:
    assert calculate("log(1e-999)") == "-999" and calculate("log(1e999 / 3 * 3)") == "999"
    assert float(calculate("ln(1e-999)")) == pytest.approx(-999 * math.log(10), rel=1e-14)
    assert float(calculate("log(2, 1e-999)")) == pytest.approx(math.log10(2) / -999, rel=1e-14)
    assert float(calculate("ln(10**999 / 3)")) == pytest.approx(999 * math.log(10) - math.log(3), rel=1e-14)
    assert float(calculate("ln(1 + 1e-10)")) == pytest.approx(1e-10, rel=1e-5)


def test_many_postfixes() -> None:
    assert calculate("1" + "!" * 60) == "1"
    assert Fraction(calculate("1" + "%" * 20)) == Fraction(1, 10**40)
    with pytest.raises(ExpressionError, match="nested more than 60 deep"):
        calculate("1" + "!" * 990)
    with pytest.raises(ExpressionError, match="more than 1000 digits"):
        calculate("1" + "%" * 990)


def test_any_text_raises_only_expression_errors() -> None:
    """Any other exception would be a failure of the infrastructure."""
    numbers = "0 1 2 3 7 10 0.5 1e-999 1e999 1e308 1e-320 5e-324 1e400 171 449 1,234 pi e"
    signs = "+ - * / // % ** ^ ! ( ) , of sqrt( abs( round( min( max( floor( ceil( log( ln( exp( sin( cos( tan("
    pieces = [
        *numbers.split(),
        *signs.split(),
        *("factorial(", "(-1)", "(1/3)", "1e-999)", "2, ", "-", ")", ")"),
    ]
    random_ = random.Random(1)
    worked = 0
    for _ in range(20_000):
        try:
            calculate(" ".join(random_.choices(pieces, k=random_.randrange(1, 9))))
            worked += 1
        except ExpressionError:
            pass
    assert worked > 500


def test_the_tool_turns_errors_into_mistakes() -> None:
    assert calculator(expression="6*7") == "42"
    with pytest.raises(ToolMistake, match="error: division by zero") as caught:
        calculator(expression="1/0")
    assert caught.value.kind == "raised"


def tree(random_: random.Random, depth: int) -> tuple[str, Fraction]:
    """A random expression and its value, which is computed beside and not from its text."""
    if depth == 0 or random_.random() < 0.2:
        number = random_.randrange(0, 10**7)
        places = random_.randrange(0, 4)
        whole, rest = divmod(number, 10**places)
        text = f"{whole:,}" if random_.random() < 0.5 else str(whole)
        return (f"{text}.{rest:0{places}d}" if places else text), Fraction(number, 10**places)
    left, a = tree(random_, depth - 1)
    right, b = tree(random_, depth - 1)
    operator = random_.choice(["+", "-", "*", "/", "//", "%", "**", "neg"])
    if operator == "neg":
        return f"-({left})", -a
    if operator == "**":
        power = random_.randrange(-3, 4)
        return (f"({left})**({power})", a**power) if a else (f"({left})^{abs(power)}", a ** abs(power))
    if operator in ("/", "//", "%") and b == 0:
        operator = "+"
    value = {"+": a + b, "-": a - b, "*": a * b}.get(operator)
    if value is None:
        value = a / b if operator == "/" else Fraction(a // b) if operator == "//" else a % b
    return f"({left}) {operator} ({right})", value


def test_it_agrees_with_fractions() -> None:
    random_ = random.Random(0)
    exact = 0
    for _ in range(2000):
        text, value = tree(random_, random_.randrange(1, 5))
        if len(text) > 1000 or max(abs(value.numerator), value.denominator) > 10**300:
            continue
        try:
            found = Fraction(calculate(text))
        except ExpressionError as wrong:  # something on the way was longer than the result
            assert "more than 1000 digits" in str(wrong)
            continue
        exact += found == value
        assert found == value or abs(found - value) <= abs(value) * Fraction(1, 10**14), text
        if value.denominator == 1:
            assert found == value, text
    assert exact > 1000
