"""calculator: arithmetic with exact fractions, parsed by Python's `ast`.

    + - * / // % ** ^ × ÷ !    1,234.5    15% (= 0.15)    15% of 80    sqrt(2)    pi    e

`translate` checks the tokens of an expression and rewrites them in Python's syntax: a number becomes a name, `!` and
percent become attributes. Python then parses the precedence, and `evaluate` walks the few kinds of nodes that can
occur. Integers and fractions are exact, so 0.1 + 0.2 is 0.3; roots, logarithms and angles are floats unless the
result is exact. Length, nesting and digits are limited, and each limit is checked before the work that it bounds.

`%` before an operand is the remainder, otherwise percent. Inside a function's parentheses a comma separates arguments.
Halves round away from zero.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from itertools import pairwise

from covey.agents.tools.tool import ToolMistake, tool

MAX_LENGTH = 1000  # characters of an expression
MAX_DEPTH = 60  # parentheses, functions, powers of powers
MAX_DIGITS = 1000  # of any number, intermediate results included
MAX_BITS = int(MAX_DIGITS * math.log2(10)) + 1
MAX_EXACT_DIGITS = 40  # a decimal fraction with more is rounded when it is shown
SHOWN_DIGITS = 15  # of a rounded result: a float has this many correct ones

Value = int | Fraction | float


class ExpressionError(Exception):
    """An expression that cannot be calculated. The text tells the model why."""


# -- Translation into Python's syntax ----------------------------------------------------------------------------------

NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
GROUPED = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]*)?"
REST = r"(?P<name>[A-Za-z_][A-Za-z_0-9]*)|(?P<op>\*\*|//|[-+*/%^(),!])"
TOKEN = re.compile(f"(?P<number>{NUMBER})|{REST}")
TOKEN_WITH_GROUPS = re.compile(f"(?P<number>{GROUPED}|{NUMBER})|{REST}")
SYNONYMS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "π": "pi", "[": "(", "]": ")"})
BINARY = {"+": "+", "-": "-", "*": "*", "of": "*", "/": "/", "//": "//", "%": "%", "**": "**", "^": "**"}


@dataclass(frozen=True, slots=True)
class Token:
    kind: str | None  # number, name, op or end
    text: str

    @property
    def starts_operand(self) -> bool:
        return self.kind == "number" or self.text == "(" or (self.kind == "name" and self.text != "of")


@dataclass
class Group:
    """The whole expression, or an open parenthesis."""

    function: str = ""  # whose arguments the parenthesis holds
    arguments: int = 1
    powers: int = 0  # powers of powers that the next operand is nested in


def tokenize(text: str) -> list[Token]:
    text = text.translate(SYNONYMS)
    tokens: list[Token] = []
    is_call: list[bool] = []  # for each open parenthesis: does it hold arguments, which commas separate?
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        match = (TOKEN if is_call and is_call[-1] else TOKEN_WITH_GROUPS).match(text, at)
        if match is None:
            raise ExpressionError(f"unexpected {text[at]!r}")
        if match[0] == "(":
            is_call.append(bool(tokens) and tokens[-1].kind == "name")
        elif match[0] == ")" and is_call:
            is_call.pop()
        tokens.append(Token(match.lastgroup, match[0]))
        at = match.end()
    return tokens


def translate(text: str) -> tuple[str, dict[str, Value]]:
    """A Python expression with the same meaning, and the values of the names that stand for its numbers."""
    python: list[str] = []
    values: dict[str, Value] = {}
    groups = [Group()]
    complete = False  # whether an operand has just ended; otherwise one is expected
    sign, factorials = "", 0
    tokens = [*tokenize(text), Token("end", "")]
    upcoming = iter(pairwise([*tokens, tokens[-1]]))
    for token, following in upcoming:
        group, word = groups[-1], token.text
        if not complete and word in ("+", "-"):
            sign = "-" if (word == "-") != (sign == "-") else "+"  # collapse consecutive signs into one
        elif not complete:
            if len(groups) + sum(group.powers for group in groups) > MAX_DEPTH:
                raise ExpressionError(f"nested more than {MAX_DEPTH} deep")
            python.append(sign)
            sign, factorials = "", 0
            if token.kind == "number" or word in CONSTANTS:
                name = f"_{len(values)}"
                values[name] = CONSTANTS[word] if word in CONSTANTS else _literal(word)
                python.append(name)
                complete = True
            elif token.kind == "name":
                if word not in FUNCTIONS:
                    raise ExpressionError(f"unknown name {word!r} (known: {', '.join([*FUNCTIONS, *CONSTANTS])})")
                if following.text != "(":
                    raise ExpressionError(f"{word} needs parentheses: {word}(...)")
                next(upcoming)
                groups.append(Group(word))
                python.append(f"{word}(")
            elif word == "(":
                groups.append(Group())
                python.append("(")
            else:
                raise ExpressionError("the expression ends too early" if not word else f"unexpected {word!r}")
        elif word == "!":
            factorials += 1
            if factorials > MAX_DEPTH:
                raise ExpressionError(f"nested more than {MAX_DEPTH} deep")
            python.append(".factorial")
        elif word == "%" and not following.starts_operand:
            python.append(".percent")
        elif word in BINARY:
            group.powers = group.powers + 1 if word in ("**", "^") else 0
            python.append(f" {BINARY[word]} ")
            complete = False
        elif word == "," and group.function:
            group.arguments, group.powers = group.arguments + 1, 0
            python.append(", ")
            complete = False
        elif word == ")" and len(groups) > 1:
            _check_arguments(groups.pop())
            python.append(")")
            factorials = 0
        elif token.kind != "end":
            hint = " (write * to multiply)" if len(groups) == 1 and (token.kind != "op" or word == "(") else ""
            raise ExpressionError(f"unexpected {word!r}{hint}")
        elif len(groups) > 1:
            raise ExpressionError("a parenthesis is not closed")
    return "".join(python), values


def _check_arguments(group: Group) -> None:
    if not group.function:
        return
    fewest, most, _ = FUNCTIONS[group.function]
    count = group.arguments
    if not fewest <= count <= most:
        expected = str(fewest) if fewest == most else f"{fewest} to {most}"
        hint = "; inside a function a comma separates arguments: write 1234, not 1,234" if count > 1 else ""
        raise ExpressionError(f"{group.function} takes {expected} argument{'s'[: most > 1]}, got {count}{hint}")


def _literal(text: str) -> Value:
    mantissa, _, exponent = text.lower().replace(",", "").partition("e")
    if len(exponent) > 5 or abs(int(exponent or 0)) > MAX_DIGITS:
        raise ExpressionError(f"{text} has more than {MAX_DIGITS} digits")
    return _bounded(Fraction(Decimal(mantissa)) * Fraction(10) ** int(exponent or 0))


# -- Evaluation --------------------------------------------------------------------------------------------------------


def evaluate(node: ast.expr, values: dict[str, Value]) -> Value:
    outer: list[ast.BinOp | ast.Attribute] = []  # left operands are visited in a loop: a long sum nests deeply there
    while isinstance(node, ast.BinOp | ast.Attribute):
        outer.append(node)
        node = node.left if isinstance(node, ast.BinOp) else node.value
    match node:
        case ast.Name(id=name):
            value = values[name]
        case ast.UnaryOp(op=sign, operand=operand):
            value = evaluate(operand, values) * (-1 if isinstance(sign, ast.USub) else 1)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            value = _bounded(FUNCTIONS[name][2](*(evaluate(argument, values) for argument in arguments)))
        case _:
            raise AssertionError(f"translate() wrote {ast.dump(node)}")
    for node in reversed(outer):
        if isinstance(node, ast.BinOp):
            value = _bounded(OPERATORS[type(node.op)](value, evaluate(node.right, values)))
        else:
            value = _bounded(_factorial(value) if node.attr == "factorial" else _divide(value, 100))
    return value


def _bounded(value: Value) -> Value:
    """A result to calculate with: finite, not too long, and an `int` where it is whole."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ExpressionError("the result is too large")
        return value
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ExpressionError(f"a number has more than {MAX_DIGITS} digits")
    return value.numerator if value.denominator == 1 else value


def _divide(a: Value, b: Value) -> Value:
    return a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a) / b


def _power(base: Value, exponent: Value) -> Value:
    if base == 0 and exponent < 0:
        raise ZeroDivisionError
    if isinstance(base, float) or not isinstance(exponent, int):
        if base < 0 and exponent != int(exponent):
            raise ExpressionError("a negative number has no real power with a fractional exponent")
        if exponent == Fraction(1, 2):
            return _sqrt(base)
        return float(base) ** (exponent if isinstance(exponent, int) else float(exponent))
    bits = max(abs(base.numerator), base.denominator).bit_length() - 1  # the power has at least bits · |exponent| bits
    if bits * abs(exponent) > MAX_BITS:
        raise ExpressionError(f"the power would have more than {MAX_DIGITS} digits")
    return Fraction(base) ** exponent


OPERATORS: dict[type[ast.operator], Callable[[Value, Value], Value]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: _divide,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: _power,
}


def _sqrt(x: Value) -> Value:
    if x < 0:
        raise ExpressionError("a negative number has no real square root")
    if not isinstance(x, float):
        above, below = math.isqrt(x.numerator), math.isqrt(x.denominator)
        if above**2 == x.numerator and below**2 == x.denominator:
            return Fraction(above, below)
    return math.sqrt(x)


_LOGS: dict[Value, Callable[[Value], float]] = {
    2: math.log2,
    10: math.log10,
}  # more exact than a quotient of logarithms


def _logarithm(function: Callable[[Value], float], x: Value) -> float:
    """The logarithm of a fraction that may be too large or too small for a float."""
    if isinstance(x, Fraction) and not 1e-300 < x < 1e300:
        return function(x.numerator) - function(x.denominator)
    return function(x)


def _log(x: Value, base: Value = 10) -> Value:
    if x <= 0 or base <= 0 or base == 1:
        raise ExpressionError("a logarithm needs a positive number, and a positive base other than 1")
    value = _logarithm(_LOGS[base], x) if base in _LOGS else _logarithm(math.log, x) / _logarithm(math.log, base)
    return round(value) if abs(value - round(value)) < 1e-13 * max(1, abs(value)) else value


def _ln(x: Value) -> Value:
    if x <= 0:
        raise ExpressionError("a logarithm needs a positive number")
    return 0 if x == 1 else _logarithm(math.log, x)


def _angle(function: Callable[[float], float]) -> Callable[[Value], Value]:
    """sin, cos or tan. A rounding error around zero becomes zero; a tangent above 1e15 is undefined."""

    def of(x: Value) -> Value:
        value = round(function(float(x)), SHOWN_DIGITS)
        if abs(value) > 1e15:
            raise ExpressionError("the tangent has no value there")
        return value

    return of


def _round(x: Value, digits: Value = 0) -> Value:
    if not isinstance(digits, int) or abs(digits) > 100:
        raise ExpressionError("round takes a whole number of digits, at most 100")
    scaled = abs(Fraction(_as_shown(x))) * Fraction(10) ** digits
    return (1 if x >= 0 else -1) * Fraction(math.floor(scaled + Fraction(1, 2))) / Fraction(10) ** digits


def _as_shown(x: Value) -> Value | Decimal:
    """A float with the digits that are shown, so that round() sees the same half as the reader."""
    return Decimal(f"{x:.{SHOWN_DIGITS}g}") if isinstance(x, float) else x


def _factorial(n: Value) -> Value:
    if not isinstance(n, int) or n < 0:
        raise ExpressionError("factorial takes a whole number, 0 or more")
    if n > MAX_DIGITS:
        raise ExpressionError(f"the factorial of {n} has more than {MAX_DIGITS} digits")
    return math.factorial(n)


def _exp(x: Value) -> Value:
    return math.exp(x) if x else 1


FUNCTIONS: dict[str, tuple[int, int, Callable[..., Value]]] = {  # fewest and most arguments
    "sqrt": (1, 1, _sqrt),
    "abs": (1, 1, abs),
    "round": (1, 2, _round),
    "min": (1, 100, lambda *xs: min(xs)),
    "max": (1, 100, lambda *xs: max(xs)),
    "floor": (1, 1, math.floor),
    "ceil": (1, 1, math.ceil),
    "log": (1, 2, _log),
    "ln": (1, 1, _ln),
    "exp": (1, 1, _exp),
    "sin": (1, 1, _angle(math.sin)),
    "cos": (1, 1, _angle(math.cos)),
    "tan": (1, 1, _angle(math.tan)),
    "factorial": (1, 1, _factorial),
}
CONSTANTS: dict[str, Value] = {"pi": math.pi, "e": math.e}


# -- Output ------------------------------------------------------------------------------------------------------------


def format_value(value: Value) -> str:
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        text = f"{value:.{SHOWN_DIGITS}g}"
        return "0" if text == "-0" else text
    return _decimal(value)


def _decimal(value: Fraction) -> str:
    """Exact if the decimals end within MAX_EXACT_DIGITS, else rounded."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest == 1:
        exact = Context(prec=MAX_BITS).divide(Decimal(value.numerator), Decimal(value.denominator))
        if len(exact.as_tuple().digits) <= MAX_EXACT_DIGITS and exact.adjusted() >= -MAX_EXACT_DIGITS:
            return f"{exact:f}"
    rounded = Context(prec=SHOWN_DIGITS).divide(Decimal(value.numerator), Decimal(value.denominator))
    return f"{rounded:f}" if -7 <= rounded.adjusted() < SHOWN_DIGITS else f"{rounded.normalize():e}"


def calculate(expression: str) -> str:
    """The value of an expression, as text. Raises `ExpressionError`."""
    if len(expression) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters")
    python, values = translate(expression.strip().removesuffix("="))
    try:
        return format_value(evaluate(ast.parse(python, mode="eval").body, values))
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None
    except OverflowError:
        raise ExpressionError("the result is too large") from None


@tool
def calculator(expression: str) -> str:
    """Calculate an arithmetic expression and return its value. It knows + - * / // % ** parentheses, sqrt, abs, round,
    min, max, floor, ceil, log (base 10, or log(x, base)), ln, exp, sin, cos, tan (radians), factorial, pi and e.

    Args:
        expression: What to calculate, for example (3 + 4) * 2 / sqrt(16).
    """
    try:
        return calculate(expression)
    except ExpressionError as error:
        raise ToolMistake("raised", f"error: {error}") from None
