"""Exact algebra for answers, so that most comparisons need no computer algebra system, which can hang.

    \\frac{1}{1+\\sqrt{2}} == \\sqrt{2}-1          3\\sqrt{12} == 6\\sqrt{3}          (x+1)^2 == x^2+2x+1

A value is a ratio of two sums of monomials: a rational coefficient times powers of atoms. Atoms are letters, Greek
letters, `i` (i² = −1) and primes with an exponent between 0 and 1, which gives roots of numbers a unique form
(√12 = 2·3^½). Such roots are linearly independent over the rationals, so equality by cross-multiplication is exact.
Anything else (functions, roots of sums, letters in exponents, values over the size limits) raises NotAlgebra.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

Monomial = tuple[tuple[str, Fraction], ...]
Sum = dict[Monomial, Fraction]

MAX_LENGTH = 300  # characters
MAX_TERMS = 100
MAX_BITS = 8192  # bits of a numerator or denominator
MAX_POWER = 64  # exponent of a sum, and degree of a root
MAX_ROOTED = 10**10  # factored by trial division

ONE: Monomial = ()
TOKEN = re.compile(
    r"\d+(?:\.\d*)?(?:\\overline\{\d+\})?|\.\d+|\.\\overline\{\d+\}|\\[A-Za-z]+|[A-Za-z]|[-+*/^_(){}\[\]]", re.ASCII
)
GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell"
)
SYMBOLS = frozenset(GREEK.split())


class NotAlgebra(ValueError):
    """Not an expression of this algebra, or too large."""


@dataclass(frozen=True)
class Ratio:
    top: Sum
    bottom: Sum

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ratio):
            return NotImplemented
        return _times(self.top, other.bottom) == _times(other.top, self.bottom)

    def __hash__(self) -> int:
        raise TypeError("equal ratios have different representations")

    def __add__(self, other: Ratio) -> Ratio:
        if self.bottom == other.bottom:
            return Ratio(_plus(self.top, other.top), self.bottom)
        top = _plus(_times(self.top, other.bottom), _times(other.top, self.bottom))
        return Ratio(top, _times(self.bottom, other.bottom))

    def __neg__(self) -> Ratio:
        return Ratio({monomial: -size for monomial, size in self.top.items()}, self.bottom)

    def __mul__(self, other: Ratio) -> Ratio:
        return Ratio(_times(self.top, other.top), _times(self.bottom, other.bottom))

    def inverse(self) -> Ratio:
        if not self.top:
            raise NotAlgebra("division by zero")
        return Ratio(self.bottom, self.top)

    def rational(self) -> Fraction | None:
        """The value, if it is rational."""
        if self.top.keys() <= {ONE} and self.bottom.keys() == {ONE}:
            return self.top.get(ONE, Fraction(0)) / self.bottom[ONE]
        return None

    def approximate(self) -> float | None:
        """The value as a float, if it is a number (rational, with roots of numbers, with π)."""
        try:
            return _approximate(self.top) / _approximate(self.bottom)
        except (NotAlgebra, OverflowError, ZeroDivisionError):
            return None

    def power(self, exponent: Ratio) -> Ratio:
        size = exponent.rational()
        if size is None:
            raise NotAlgebra("a letter in an exponent")
        if size.denominator > 1:
            return self.root(size.denominator).power(number(Fraction(size.numerator)))
        if size < 0:
            return self.inverse().power(number(-size))
        if (own := self.rational()) is not None:
            if size * max(own.numerator.bit_length(), own.denominator.bit_length()) > MAX_BITS:
                raise NotAlgebra("too large a number")
            return number(own ** int(size))
        if size > MAX_POWER:
            raise NotAlgebra("too high a power")
        result = number(Fraction(1))
        for _ in range(int(size)):
            result = result * self
        return result

    def root(self, degree: int) -> Ratio:
        if degree < 2 or degree > MAX_POWER:
            raise NotAlgebra(f"no root of degree {degree}")
        size = self.rational()
        if size is not None:
            return _root_of_number(size, degree)
        if self.bottom == {ONE: 1} and len(self.top) == 1:
            ((monomial, factor),) = self.top.items()
            if factor == 1 and len(monomial) == 1 and monomial[0][1] == 1 and monomial[0][0] != "i":
                return _atom(monomial[0][0], Fraction(1, degree))
        raise NotAlgebra("a root of a sum or product")


def number(value: Fraction) -> Ratio:
    return Ratio({ONE: value} if value else {}, {ONE: Fraction(1)})


def _approximate(total: Sum) -> float:
    value = 0.0
    for monomial, size in total.items():
        product = float(size)
        for name, exponent in monomial:
            if name != "\\pi" and not name.isdigit():
                raise NotAlgebra("a letter")
            product *= (math.pi if name == "\\pi" else float(name)) ** float(exponent)
        value += product
    return value


def _atom(name: str, exponent: Fraction = Fraction(1)) -> Ratio:
    return Ratio({((name, exponent),): Fraction(1)}, {ONE: Fraction(1)})


def _plus(a: Sum, b: Sum) -> Sum:
    total = dict(a)
    for monomial, size in b.items():
        total[monomial] = total.get(monomial, Fraction(0)) + size
    return _bounded({monomial: size for monomial, size in total.items() if size})


def _times(a: Sum, b: Sum) -> Sum:
    total: Sum = {}
    for left, x in a.items():
        for right, y in b.items():
            monomial, factor = _join(left, right)
            total[monomial] = total.get(monomial, Fraction(0)) + x * y * factor
    return _bounded({monomial: size for monomial, size in total.items() if size})


def _bounded(total: Sum) -> Sum:
    if len(total) > MAX_TERMS:
        raise NotAlgebra("too many terms")
    if any(max(s.numerator.bit_length(), s.denominator.bit_length()) > MAX_BITS for s in total.values()):
        raise NotAlgebra("too large a number")
    return total


def _join(left: Monomial, right: Monomial) -> tuple[Monomial, Fraction]:
    """The product of two monomials. Whole powers of primes and the signs of i² become a factor."""
    powers, factor = dict(left), Fraction(1)
    for name, exponent in right:
        powers[name] = powers.get(name, Fraction(0)) + exponent
    for name in list(powers):
        if name == "i":
            factor *= -1 if powers[name] % 4 >= 2 else 1
            powers[name] %= 2
        elif name.isdigit():
            whole = powers[name] // 1
            factor *= Fraction(int(name)) ** int(whole)
            powers[name] -= whole
    return tuple(sorted((name, exponent) for name, exponent in powers.items() if exponent)), factor


def _root_of_number(size: Fraction, degree: int) -> Ratio:
    if size < 0:
        unit = _atom("i") if degree == 2 else number(Fraction(-1))
        if degree % 2 == 0 and degree != 2:
            raise NotAlgebra("an even root of a negative number")
        return unit * _root_of_number(-size, degree)
    # (p/q)^(1/k) = (p·q^(k−1))^(1/k) / q
    rest = size.numerator * size.denominator ** (degree - 1)
    if rest > MAX_ROOTED:
        raise NotAlgebra("too large a number under a root")
    result, prime = number(Fraction(1 if rest else 0, size.denominator)), 2
    while rest > 1:
        prime = rest if prime * prime > rest else prime
        count = 0
        while rest % prime == 0:
            rest, count = rest // prime, count + 1
        whole, part = divmod(count, degree)
        result = result * number(Fraction(prime) ** whole)
        if part:
            result = result * _atom(str(prime), Fraction(part, degree))
        prime += 1
    return result


def parse(text: str) -> Ratio:
    """Parse LaTeX without spaces (`\\frac{1}{2}x^2-3\\sqrt{5}`), or plain `1/2*x^2`."""
    if len(text) > MAX_LENGTH:
        raise NotAlgebra("too long")
    tokens = TOKEN.findall(text)
    if "".join(tokens) != text or not tokens:
        raise NotAlgebra(f"not algebra: {text[:50]!r}")
    parser = _Parser(tokens)
    try:
        value = parser.sum()
    except RecursionError:
        raise NotAlgebra("nested too deeply") from None
    if parser.tokens:
        raise NotAlgebra(f"not algebra at {parser.tokens[-1]!r}")
    return value


class _Parser:
    """A recursive descent parser; `tokens` is the stack of remaining tokens."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens[::-1]

    @property
    def next(self) -> str:
        return self.tokens[-1] if self.tokens else ""

    def take(self, expected: str = "") -> str:
        if not self.tokens or (expected and self.next != expected):
            raise NotAlgebra(f"{expected or 'something'} expected")
        return self.tokens.pop()

    def sum(self) -> Ratio:
        total = self.signed()
        while self.next in ("+", "-"):
            total = total + self.signed()
        return total

    def signed(self) -> Ratio:
        negative = False
        while self.next in ("+", "-"):
            negative ^= self.take() == "-"
        product = self.product()
        return -product if negative else product

    def product(self) -> Ratio:
        result = self.factor()
        while self.next and self.next not in "+-)]}":
            if self.next == "/":
                self.take()
                result = result * self.factor().inverse()
                continue
            if self.next == "*":
                self.take()
            result = result * self.factor()
        return result

    def factor(self) -> Ratio:
        base = self.base()
        if self.next == "^":
            self.take()
            negative = self.next == "-" and bool(self.take())
            exponent = self.base()
            return base.power(-exponent if negative else exponent)
        return base

    def base(self) -> Ratio:
        token = self.take()
        if token in "([{":
            inside = self.sum()
            self.take({"(": ")", "[": "]", "{": "}"}[token])
            return inside
        if token[0].isdigit() or token[0] == ".":
            return self.mixed(_decimal(token))
        if token == "\\frac":
            return self.fraction_part() * self.fraction_part().inverse()
        if token == "\\sqrt":
            return self.radical()
        if token.isalpha() or token[1:] in SYMBOLS:
            return _atom(token + self.subscript())
        raise NotAlgebra(f"not algebra at {token!r}")

    def mixed(self, whole: Fraction) -> Ratio:
        """`2\\frac{1}{3}` is a mixed number; `2\\frac{x}{3}` and `2\\frac{4}{3}` are products."""
        rest = self.tokens[-7:][::-1]
        if rest[:1] == ["\\frac"] and whole.denominator == 1 and "".join(rest[1::3] + rest[3::3]) == "{{}}":
            top, bottom = rest[2], rest[5]
            if top.isdigit() and bottom.isdigit() and int(top) < int(bottom):
                del self.tokens[-7:]
                return number(whole + Fraction(int(top), int(bottom)))
        return number(whole)

    def fraction_part(self) -> Ratio:
        """`\\frac12` takes single digits, as TeX does."""
        if self.next.isdigit() and len(self.next) > 1:
            digits = self.take()
            self.tokens.append(digits[1:])
            return number(Fraction(digits[0]))
        return self.base()

    def radical(self) -> Ratio:
        degree = 2
        if self.next == "[":
            self.take()
            index = self.sum().rational()
            self.take("]")
            if index is None or index.denominator != 1:
                raise NotAlgebra("the degree of a root is not an integer")
            degree = int(index)
        return self.base().root(degree)

    def subscript(self) -> str:
        if self.next != "_":
            return ""
        self.take()
        if self.next != "{":
            return "_" + self.take()
        self.take()
        inside = ""
        while (token := self.take()) != "}":
            inside += token
        return "_" + inside


def _decimal(token: str) -> Fraction:
    plain, _, repeating = token.partition("\\overline{")
    value = Fraction(("0" + plain).rstrip("."))
    if not repeating:
        return value
    if "." not in plain:
        raise NotAlgebra("an overline over a whole number")
    digits, places = repeating.rstrip("}"), len(plain.partition(".")[2])
    return value + Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
