"""Rewards for answers that are numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from covey.rewards.function import reward
from covey.types import Task

# A minus is a sign unless it stands right behind something it could be subtracted from: 10-5 holds 10 and 5.
# Commas belong to the number where they part thousands: 1,234 is one number, 1,2 are two.
NUMBER = re.compile(
    r"""(?P<sign>(?<![\w.)\]}%])[-−])?
        [$€£]?
        (?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)? | [0-9]+(?:\.[0-9]+)? | \.[0-9]+)
        (?:[ ]?/[ ]?(?P<below>0*[1-9][0-9]*)(?![0-9./]) | [eE](?P<power>[-+−]?[0-9]{1,3})(?![0-9A-Za-z]))?
        (?:[ ]?\\?(?P<percent>%))?""",
    re.VERBOSE,
)
LONGEST = 1000  # characters of a number; longer ones are none


@dataclass(frozen=True, slots=True)
class Number:
    """`50%` is 50 with its sign."""

    size: Fraction
    percent: bool = False

    def meets(self, gold: Number) -> bool:
        """Equal as written or by value: `50%` is met by 50%, 50 and 0.5, and meets 50 and 0.5."""
        return self.size == gold.size or (self.percent != gold.percent and self._value() == gold._value())

    def _value(self) -> Fraction:
        return self.size / 100 if self.percent else self.size


@reward(gold=lambda answer: gold_number(answer))
def number(answer: Any, final_answer: str) -> dict[str, float]:
    """1 if the reply is the number and nothing else; a full stop behind it is allowed. 0.75 and 3/4 are one number,
    1e3 and 1,000 too, and 50% is met by 50% or 50 or 0.5.

    Extra `lenient`: the last number in the reply, whatever stands around it.
    """
    gold = gold_number(answer)
    reply = whole_number(final_answer)
    return {
        "reward": float(reply is not None and reply.meets(gold)),
        "lenient": float(_ends_in(final_answer, gold)),
    }


@reward(gold=lambda answer: gold_number(answer))
def math_reward_string_equal(answer: Any, final_answer: str) -> float:
    """1 if the last number of the final answer is the answer's, which may be written as GSM8K does (`#### 72`)."""
    return float(_ends_in(final_answer, gold_number(answer)))


def _ends_in(text: str, gold: Number) -> bool:
    found = last_number(text)
    return found is not None and found.meets(gold)


def whole_numbers(task: Task) -> None:
    """A column `numbers` that is a list of them. One of text, as in a CSV file, would be read letter by letter."""
    found = task.columns["numbers"]
    is_list = isinstance(found, Sequence) and not isinstance(found, str)
    if not is_list or not all(isinstance(one, int) and not isinstance(one, bool) for one in found):
        raise ValueError(f"numbers must be a list of whole numbers, got {found!r:.60}")


@reward(name="sorted", check=whole_numbers)
def sorted_numbers(numbers: Sequence[int], final_answer: str) -> dict[str, float]:
    """1 if the reply is the sorted numbers, written `1 2 3`.

    Extra `lenient`: the last numbers of the reply, as many as were given, are in order, whatever stands around them.
    """
    right = sorted(numbers)
    found = re.findall("[0-9]+", final_answer)[-len(right) :]
    return {
        "reward": float(final_answer.strip() == " ".join(map(str, right))),
        "lenient": float(found == list(map(str, right))),
    }


def last_number(text: str) -> Number | None:
    found = list(NUMBER.finditer(text))
    return _read(found[-1]) if found else None


def whole_number(text: str) -> Number | None:
    """The number that is all of a text, but for a full stop."""
    found = NUMBER.fullmatch(text.strip().removesuffix("."))
    return None if found is None else _read(found)


def gold_number(answer: Any) -> Number:
    """The number an answer column holds. One that holds more than a number would reward wrong replies: 7 for a + 7."""
    text = str(answer).rpartition("####")[2].strip().removesuffix(".")
    found = whole_number(text)
    if found is None:
        raise ValueError(f"the answer {text[:50]!r} is not a number")
    return found


def _read(found: re.Match[str]) -> Number | None:
    if len(found[0]) > LONGEST:
        return None
    size = Fraction(found["digits"].replace(",", "")) / int(found["below"] or 1)
    size *= Fraction(10) ** int((found["power"] or "0").replace("−", "-"))
    return Number(-size if found["sign"] else size, found["percent"] is not None)
