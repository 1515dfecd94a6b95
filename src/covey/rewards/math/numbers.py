"""The rewards `number` and `math_reward_string_equal`: the number in a reply equals the one of the task."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from covey.rewards.function import inline, reward

# A minus directly after something it could be subtracted from is no sign: 10-5 has the numbers 10 and 5.
# Commas that separate thousands belong to the number: 1,234 is one number, 1,2 are two.
NUMBER = re.compile(
    r"""(?P<sign>(?<![\w.)\]}%])[-−])?
        [$€£]?
        (?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)? | [0-9]+(?:\.[0-9]+)? | \.[0-9]+)
        (?:[ ]?/[ ]?(?P<below>0*[1-9][0-9]*)(?![0-9./]) | [eE](?P<power>[-+−]?[0-9]{1,3})(?![0-9A-Za-z]))?
        (?:[ ]?\\?(?P<percent>%))?""",
    re.VERBOSE,
)
MAX_NUMBER_LENGTH = 1000  # characters; longer numbers are not read


@dataclass(frozen=True, slots=True)
class Number:
    """`50%` has the size 50 and `percent`."""

    size: Fraction
    percent: bool = False

    def matches(self, gold: Number) -> bool:
        """Equal as written or in value: `50%` and any of 50%, 50 and 0.5."""
        return self.size == gold.size or (self.percent != gold.percent and self._value() == gold._value())

    def _value(self) -> Fraction:
        return self.size / 100 if self.percent else self.size


@inline
@reward(gold=lambda answer: gold_number(answer))
def number(answer: Any, final_answer: str) -> dict[str, float]:
    """1 if the reply is the number and nothing else, up to a full stop. 0.75 and 3/4 are equal, as are 1e3 and 1,000;
    50% matches 50%, 50 and 0.5.

    Extra `lenient`: 1 if the last number in the reply is the answer, whatever text surrounds it.
    """
    gold = gold_number(answer)
    reply = whole_number(final_answer)
    return {
        "reward": float(reply is not None and reply.matches(gold)),
        "lenient": float(_ends_in(final_answer, gold)),
    }


@inline
@reward(gold=lambda answer: gold_number(answer))
def math_reward_string_equal(answer: Any, final_answer: str) -> float:
    """1 if the last number of the final answer is the answer, which may have GSM8K's form (`#### 72`)."""
    return float(_ends_in(final_answer, gold_number(answer)))


def _ends_in(text: str, gold: Number) -> bool:
    last = last_number(text)
    return last is not None and last.matches(gold)


def last_number(text: str) -> Number | None:
    numbers = list(NUMBER.finditer(text))
    return _number(numbers[-1]) if numbers else None


def whole_number(text: str) -> Number | None:
    """The number that the whole text is, up to a full stop."""
    match = NUMBER.fullmatch(text.strip().removesuffix("."))
    return None if match is None else _number(match)


def gold_number(answer: Any) -> Number:
    """The number in an answer column. Anything else is refused: reading 7 from a + 7 would reward wrong replies."""
    text = str(answer).rpartition("####")[2].strip().removesuffix(".")
    value = whole_number(text)
    if value is None:
        raise ValueError(f"the answer {text[:50]!r} is not a number")
    return value


def _number(match: re.Match[str]) -> Number | None:
    if len(match[0]) > MAX_NUMBER_LENGTH:
        return None
    size = Fraction(match["digits"].replace(",", "")) / int(match["below"] or 1)
    size *= Fraction(10) ** int((match["power"] or "0").replace("−", "-"))
    return Number(-size if match["sign"] else size, match["percent"] is not None)
