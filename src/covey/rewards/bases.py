"""Numbers written in another base than ten: `52_8`, `(1101)_{2}`, `\\text{A5}_{11}`, `52 base 8`, `52_{\\text{eight}}`.

A base is part of the answer. Gold `52_8` asks for these digits in this base: 52, 52_9 and 42 are other answers, and
`24_{10}` is 24. A gold answer without a base says nothing about the base (MATH has `110111` for "express your answer in
base 2"), so there the same digits in any base that has them will do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
BASES |= {"eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16}
DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"

# Tidy text, so without spaces outside \text{…}.
_MARK = r"(?:_|(?:\\text\{)?\(?in\s*base|(?:\\text\{)?\(?base)"
_BASE = r"(\d{1,2}|" + "|".join(BASES) + r")(?:_?\{?10\}?)?"
BASED = re.compile(
    rf"([-+]?)[({{]*(?:\\text\{{)?([0-9A-Z]+(?:\.[0-9A-Z]+)?)[)}}]*{_MARK}[{{}}\s]*(?:\\text\{{)?\s*{_BASE}[)}}\s]*"
)
INSIDE = re.compile(r"(?<![A-Za-z_\d])[({]*(?:\\text\{)?\d[0-9A-Z.]*[)}]*_")


@dataclass(frozen=True, slots=True)
class Numeral:
    """Digits and the base they are written in."""

    digits: str  # with their sign, without leading zeros
    base: int


def numeral(text: str) -> Numeral | None:
    """A tidy text that is a number with its base. None: it is something else, or has a digit that the base lacks."""
    found = BASED.fullmatch(text)
    if found is None:
        return None
    sign, digits, named = found.groups()
    base = BASES[named] if named in BASES else int(named)
    if not 2 <= base <= len(DIGITS) or not set(digits) - {"."} <= set(DIGITS[:base]):
        return None
    return Numeral(sign.replace("+", "") + (digits.lstrip("0") or "0"), base)


def same_numeral(gold: str, reply: str) -> bool | None:
    """Whether two tidy texts are one number in one base. None: no base is written in either of them."""
    theirs, ours = numeral(gold), numeral(reply)
    if theirs is None and ours is None:
        # Bases in a sum, or with digits that they do not have: math-verify would ignore them.
        return False if INSIDE.search(gold) or INSIDE.search(reply) else None
    if theirs is not None and ours is not None:
        return theirs == ours
    if theirs is None:
        return ours is not None and ours == numeral(f"{gold}_{{{ours.base}}}")
    return theirs.base == 10 and theirs == numeral(f"{reply}_{{10}}")
