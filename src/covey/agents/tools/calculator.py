"""calculator: arithmetic on an expression tree of its own.

Text is split into tokens, parsed into `Number`, `Prefix`, `Binary` and `Apply` nodes, and evaluated. Nothing else can
be written: no names but the listed ones, no attributes, no strings. Integers and fractions are exact, so 0.1 + 0.2 is
0.3; roots, logarithms and angles are floats unless they come out even. Caps on length, depth and digits are checked
before the work that they bound.

    + - * / // % ** ^ × ÷ !    1,234.5    15% (= 0.15)    15% of 80    sqrt(2)    pi    e

`%` before an operand is the remainder, otherwise percent. Inside a function's parentheses a comma separates arguments.
Halves round away from zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction

from covey.agents.tools.tool import ToolMistake, tool

MAX_LENGTH = 1000  # characters of an expression
MAX_DEPTH = 60  # parentheses, functions, powers of powers
MAX_DIGITS = 1000  # of any number on the way
MAX_BITS = int(MAX_DIGITS * math.log2(10)) + 1
MAX_EXACT_DIGITS = 40  # a decimal fraction with more is rounded when it is shown
SHOWN_DIGITS = 15  # of what is rounded: every one of them is right in a float

Value = int | Fraction | float


class Wrong(Exception):
    """What is wrong with an expression."""


# Text → tokens


@dataclass(frozen=True, slots=True)
class Token:
    kind: str  # number | name | op | end
    text: str


NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
GROUPED = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]*)?"
WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
OPERATOR = re.compile(r"\*\*|//|[-+*/%^(),!]")
PLAIN = re.compile(NUMBER)
WITH_GROUPS = re.compile(f"{GROUPED}|{NUMBER}")
SAME = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "π": "pi", "[": "(", "]": ")"})


def tokens(text: str) -> list[Token]:
    text = text.translate(SAME)
    found: list[Token] = []
    arguments: list[bool] = []  # for each open parenthesis: is it a function's, where a comma separates?
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        number = PLAIN if arguments and arguments[-1] else WITH_GROUPS
        kinds = (("number", number), ("name", WORD), ("op", OPERATOR))
        token = next((Token(kind, match[0]) for kind, p in kinds if (match := p.match(text, at))), None)
        if token is None:
            raise Wrong(f"unexpected {text[at]!r}")
        if token.text == "(":
            arguments.append(bool(found) and found[-1].kind == "name")
        elif token.text == ")" and arguments:
            arguments.pop()
        found.append(token)
        at += len(token.text)
    return [*found, Token("end", "")]


# Tokens → tree


@dataclass(frozen=True, slots=True)
class Number:
    value: Value


@dataclass(frozen=True, slots=True)
class Prefix:
    sign: int
    of: Node


@dataclass(frozen=True, slots=True)
class Binary:
    operator: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Apply:
    function: str
    arguments: tuple[Node, ...]


Node = Number | Prefix | Binary | Apply


class Parser:
    """Precedence from loose to tight: + -, * / // %, signs, powers (from the right), ! and percent."""

    def __init__(self, found: list[Token]) -> None:
        self.tokens = found
        self.at = 0
        self.depth = 0

    @property
    def next(self) -> Token:
        return self.tokens[self.at]

    def take(self, *texts: str) -> str | None:
        token = self.next
        if token.kind == "number" or token.text not in texts:
            return None
        self.at += 1
        return token.text

    def whole(self) -> Node:
        tree = self.sum()
        if self.next.kind != "end":
            missing = " (write * to multiply)" if self.next.kind != "op" or self.next.text == "(" else ""
            raise Wrong(f"unexpected {self.next.text!r}{missing}")
        return tree

    def sum(self) -> Node:
        tree = self.product()
        while operator := self.take("+", "-"):
            tree = Binary(operator, tree, self.product())
        return tree

    def product(self) -> Node:
        tree = self.signed()
        while operator := self.take("*", "/", "//", "%", "of"):
            tree = Binary("*" if operator == "of" else operator, tree, self.signed())
        return tree

    def signed(self) -> Node:
        sign, signs = 1, 0
        while operator := self.take("-", "+"):
            sign, signs = (-sign if operator == "-" else sign), signs + 1
        tree = self.power()
        return Prefix(sign, tree) if signs else tree

    def power(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Wrong(f"nested more than {MAX_DEPTH} deep")
        tree = self.postfix()
        if self.take("**", "^"):
            tree = Binary("**", tree, self.signed())
        self.depth -= 1
        return tree

    def postfix(self) -> Node:
        tree = self.atom()
        factorials = 0
        while True:
            if self.take("!"):
                factorials += 1
                if factorials > MAX_DEPTH:
                    raise Wrong(f"nested more than {MAX_DEPTH} deep")
                tree = Apply("factorial", (tree,))
            elif self.next.text == "%" and not self._operand(self.tokens[self.at + 1]):
                self.at += 1
                tree = Binary("/", tree, Number(100))
            else:
                return tree

    @staticmethod
    def _operand(token: Token) -> bool:
        return token.kind == "number" or token.text == "(" or (token.kind == "name" and token.text != "of")

    def atom(self) -> Node:
        token = self.next
        self.at += 1
        if token.kind == "number":
            return Number(_literal(token.text))
        if token.kind == "name":
            return self.named(token.text)
        if token.text == "(":
            tree = self.sum()
            self.close()
            return tree
        raise Wrong("the expression ends too early" if token.kind == "end" else f"unexpected {token.text!r}")

    def named(self, name: str) -> Node:
        if name in CONSTANTS:
            return Number(CONSTANTS[name])
        if name not in FUNCTIONS:
            raise Wrong(f"unknown name {name!r} (known: {', '.join([*FUNCTIONS, *CONSTANTS])})")
        if not self.take("("):
            raise Wrong(f"{name} needs parentheses: {name}(...)")
        arguments = [self.sum()]
        while self.take(","):
            arguments.append(self.sum())
        self.close()
        fewest, most, _ = FUNCTIONS[name]
        if not fewest <= len(arguments) <= most:
            wanted = str(fewest) if fewest == most else f"{fewest} to {most}"
            hint = (
                "; inside a function a comma separates arguments: write 1234, not 1,234" if len(arguments) > 1 else ""
            )
            raise Wrong(f"{name} takes {wanted} argument{'s'[: most > 1]}, got {len(arguments)}{hint}")
        return Apply(name, tuple(arguments))

    def close(self) -> None:
        if not self.take(")"):
            raise Wrong("a parenthesis is not closed" if self.next.kind == "end" else f"unexpected {self.next.text!r}")


def _literal(text: str) -> Value:
    mantissa, _, exponent = text.lower().replace(",", "").partition("e")
    if len(exponent) > 5 or abs(int(exponent or 0)) > MAX_DIGITS:
        raise Wrong(f"{text} has more than {MAX_DIGITS} digits")
    return _kept(Fraction(Decimal(mantissa)) * Fraction(10) ** int(exponent or 0))


# Tree → value


def value_of(tree: Node) -> Value:
    later: list[tuple[str, Node]] = []  # a long sum leans to the left: it is not deep for being long
    while isinstance(tree, Binary):
        later.append((tree.operator, tree.right))
        tree = tree.left
    value = _part(tree)
    for operator, right in reversed(later):
        value = _kept(OPERATORS[operator](value, value_of(right)))
    return value


def _part(tree: Number | Prefix | Apply) -> Value:
    match tree:
        case Number(value):
            return value
        case Prefix(sign, inner):
            return sign * value_of(inner)
        case Apply(name, arguments):
            return _kept(FUNCTIONS[name][2](*map(value_of, arguments)))


def _kept(value: Value) -> Value:
    """A result that may be worked on: an integer where it is one, finite, and not too long."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Wrong("the result is too large")
        return value
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise Wrong(f"a number has more than {MAX_DIGITS} digits")
    return value.numerator if value.denominator == 1 else value


def _power(base: Value, exponent: Value) -> Value:
    if base == 0 and exponent < 0:
        raise ZeroDivisionError
    if isinstance(base, float) or not isinstance(exponent, int):
        if base < 0 and exponent != int(exponent):
            raise Wrong("a negative number has no real power with a fractional exponent")
        if exponent == Fraction(1, 2):
            return _sqrt(base)
        return float(base) ** (exponent if isinstance(exponent, int) else float(exponent))
    bits = max(abs(base.numerator), base.denominator).bit_length() - 1  # the power has at least bits · |exponent| bits
    if bits * abs(exponent) > MAX_BITS:
        raise Wrong(f"the power would have more than {MAX_DIGITS} digits")
    return Fraction(base) ** exponent


OPERATORS: dict[str, Callable[[Value, Value], Value]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a) / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "**": _power,
}


def _sqrt(x: Value) -> Value:
    if x < 0:
        raise Wrong("a negative number has no real square root")
    if not isinstance(x, float):
        above, below = math.isqrt(x.numerator), math.isqrt(x.denominator)
        if above**2 == x.numerator and below**2 == x.denominator:
            return Fraction(above, below)
    return math.sqrt(x)


_LOGS: dict[Value, Callable[[Value], float]] = {2: math.log2, 10: math.log10}  # closer than the quotient


def _logarithm(function: Callable[[Value], float], x: Value) -> float:
    """A fraction may lie beyond all floats while its logarithm does not."""
    if isinstance(x, Fraction) and not 1e-300 < x < 1e300:
        return function(x.numerator) - function(x.denominator)
    return function(x)


def _log(x: Value, base: Value = 10) -> Value:
    if x <= 0 or base <= 0 or base == 1:
        raise Wrong("a logarithm needs a positive number, and a positive base other than 1")
    found = _logarithm(_LOGS[base], x) if base in _LOGS else _logarithm(math.log, x) / _logarithm(math.log, base)
    return round(found) if abs(found - round(found)) < 1e-13 * max(1, abs(found)) else found


def _ln(x: Value) -> Value:
    if x <= 0:
        raise Wrong("a logarithm needs a positive number")
    return 0 if x == 1 else _logarithm(math.log, x)


def _angle(function: Callable[[float], float]) -> Callable[[Value], Value]:
    """sin, cos, tan. What rounding leaves of a zero is zero; a tangent beyond all floats nearby has no value."""

    def of(x: Value) -> Value:
        found = round(function(float(x)), SHOWN_DIGITS)
        if abs(found) > 1e15:
            raise Wrong("the tangent has no value there")
        return found

    return of


def _rounded(x: Value, digits: Value = 0) -> Value:
    if not isinstance(digits, int) or abs(digits) > 100:
        raise Wrong("round takes a whole number of digits, at most 100")
    scaled = abs(Fraction(_tidy(x))) * Fraction(10) ** digits
    return (1 if x >= 0 else -1) * Fraction(math.floor(scaled + Fraction(1, 2))) / Fraction(10) ** digits


def _tidy(x: Value) -> Value | Decimal:
    """A float as it is shown, so that round() sees the half that the reader sees."""
    return Decimal(f"{x:.{SHOWN_DIGITS}g}") if isinstance(x, float) else x


def _factorial(n: Value) -> Value:
    if not isinstance(n, int) or n < 0:
        raise Wrong("factorial takes a whole number, 0 or more")
    if n > MAX_DIGITS:
        raise Wrong(f"the factorial of {n} has more than {MAX_DIGITS} digits")
    return math.factorial(n)


def _exp(x: Value) -> Value:
    return math.exp(x) if x else 1


FUNCTIONS: dict[str, tuple[int, int, Callable[..., Value]]] = {  # fewest and most arguments
    "sqrt": (1, 1, _sqrt),
    "abs": (1, 1, abs),
    "round": (1, 2, _rounded),
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


# Value → text


def shown(value: Value) -> str:
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        text = f"{value:.{SHOWN_DIGITS}g}"
        return "0" if text == "-0" else text
    return _decimal(value)


def _decimal(value: Fraction) -> str:
    """Exact where the decimals end soon, else rounded."""
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
    """The value of an expression, as text; or `Wrong`."""
    if len(expression) > MAX_LENGTH:
        raise Wrong(f"longer than {MAX_LENGTH} characters")
    try:
        return shown(value_of(Parser(tokens(expression.strip().removesuffix("="))).whole()))
    except ZeroDivisionError:
        raise Wrong("division by zero") from None
    except OverflowError:
        raise Wrong("the result is too large") from None


@tool
def calculator(expression: str) -> str:
    """Calculate an arithmetic expression and return its value. It knows + - * / // % ** parentheses, sqrt, abs, round,
    min, max, floor, ceil, log (base 10, or log(x, base)), ln, exp, sin, cos, tan (radians), factorial, pi and e.

    Args:
        expression: What to calculate, for example (3 + 4) * 2 / sqrt(16).
    """
    try:
        return calculate(expression)
    except Wrong as wrong:
        raise ToolMistake("raised", f"error: {wrong}") from None
