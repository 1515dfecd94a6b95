"""Rewards for answers that are numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from covey.rewards.function import reward
from covey.types import Task

# A minus is a sign unless it stands right behind something it could be subtracted from: 10-5 holds 10 and 5.
# Commas belong to the number where they part thousands: 1,234 is one number, 1,2 are two.
NUMBER = re.compile(
    r"""(?P<sign>(?<![\w.)\]}%])[-−])?
        [$€£]?
        (?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)? | [0-9]+(?:\.[0-9]+)? | \.[0-9]+)""",
    re.VERBOSE,
)


@reward(gold=lambda answer: gold_number(answer))
def number(answer: Any, final_answer: str) -> dict[str, float]:
    """1 if the reply is the number and nothing else; a full stop behind it is allowed.

    Extra `lenient`: the last number in the reply, whatever stands around it.
    """
    gold = gold_number(answer)
    reply = NUMBER.fullmatch(final_answer.strip().removesuffix("."))
    return {
        "reward": float(reply is not None and _value(reply) == gold),
        "lenient": float(last_number(final_answer) == gold),
    }


@reward(gold=lambda answer: gold_number(answer))
def math_reward_string_equal(answer: Any, final_answer: str) -> float:
    """1 if the last number of the final answer is the answer's, which may be written as GSM8K does (`#### 72`)."""
    return float(last_number(final_answer) == gold_number(answer))


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


def last_number(text: str) -> Decimal | None:
    found = list(NUMBER.finditer(text))
    return _value(found[-1]) if found else None


def gold_number(answer: Any) -> Decimal:
    """The number an answer column holds. One that holds more than a number would reward wrong replies: 7 for 3/7."""
    text = str(answer).rpartition("####")[2].strip().removesuffix(".").removesuffix("%")
    found = NUMBER.fullmatch(text)
    if found is None:
        raise ValueError(f"the answer {text[:50]!r} is not a number")
    return _value(found)


def _value(found: re.Match[str]) -> Decimal:
    size = Decimal(found["digits"].replace(",", ""))
    return -size if found["sign"] else size
