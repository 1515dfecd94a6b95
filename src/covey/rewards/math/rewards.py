"""Rewards for answers that are numbers."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from covey.errors import Absent
from covey.imports import install_extra
from covey.rewards.answers import BOX, boxed, hashed, stated, tagged
from covey.rewards.function import reward
from covey.rewards.math import verify_process
from covey.rewards.math.equality import CHOICE, LONGEST, WORD, Pair, compare, equal, plain_choice, value
from covey.rewards.math.latex import TEXT, quantity, tidy
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
LONGEST_NUMBER = 1000  # characters of a number; longer ones are none


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
    if len(found[0]) > LONGEST_NUMBER:
        return None
    size = Fraction(found["digits"].replace(",", "")) / int(found["below"] or 1)
    size *= Fraction(10) ** int((found["power"] or "0").replace("−", "-"))
    return Number(-size if found["sign"] else size, found["percent"] is not None)


# -- Rewards for answers that are mathematics --------------------------------------------------------------------------
# `math_equal` compares exactly and at once (`equality.py`): numbers, fractions, mixed numbers, percentages, surds,
# polynomials, numbers with a base, tuples, intervals, sets, matrices, letters of a choice, and else the text in one
# spelling. `math_verify` asks the package of that name about expressions that are left open, in a process that can be
# killed.
#
# Deliberate: an unknown unit, or one that only one side writes, does not count; two known units must be the same. `50%`
# is met by 50 and by 0.5. `x = 5` is met by 5, and 5 by `2+3 = 5`. Lists without brackets, and sets, have no order; a
# reply must hold each item as often as the gold answer. Decimals are exact: 0.33 is not 1/3. `52_8` is not met by 52.

NO_PROSE = re.compile(TEXT.pattern + r"|\\(?:begin|end)\{[a-z]+\}")
SEGMENT = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
LAST = re.compile(
    r"(?:(?<![\w.)\]}%])[-−]\s?)?[$€£]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:\s?/\s?\d+(?:\.\d+)?)?%?"
)
SENTENCE = re.compile(r"(?<!\d)\.\s|\.\s(?=[A-Z])|\s(?:because|since)\s")
MAX_QUESTIONS = 20  # to math-verify about one answer


@reward(gold=lambda answer: gold_texts(answer))
def math_equal(answer: Any, final_answer: str) -> float:
    """1 if the final answer of the reply equals the answer, exactly. `answer` may be a list of acceptable ones."""
    reply = final_expression(final_answer)
    return float(any(equal(gold, reply) is True for gold in gold_texts(answer)))


def _check(task: Task) -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise Absent(f"reward math_verify needs the package math-verify\n  fix: {install_extra('math')}")


@reward(check=_check, gold=lambda answer: gold_texts(answer))
async def math_verify(answer: Any, final_answer: str, deadline: float = 5.0) -> dict[str, float]:
    """The same, and what that leaves open is put to math-verify: each pair of expressions for up to `deadline` seconds.

    Extra `timeout`: 1 where it took longer, which is then not equal: the model wrote the expression.
    """
    reply, golds = final_expression(final_answer), gold_texts(answer)
    if any(equal(gold, reply) for gold in golds):
        return {"reward": 1.0, "timeout": 0.0}
    late = False
    for gold in golds:
        verdict = await _verified(gold, reply, deadline)
        if verdict:
            return {"reward": 1.0, "timeout": 0.0}
        late |= verdict is None
    return {"reward": 0.0, "timeout": float(late)}


async def _verified(gold: str, reply: str, deadline: float) -> bool | None:
    """Ask about one open pair after the other until the answer is decided. None: a question took too long."""
    known: dict[Pair, bool] = {}
    verdict, pairs = compare(gold, reply, known)
    while verdict is None and pairs and len(known) < MAX_QUESTIONS:
        found = await verify_process.verify(*pairs[0], deadline)
        if found is None:
            return None
        known[pairs[0]] = found
        verdict, pairs = compare(gold, reply, known)
    return bool(verdict)


def gold_texts(answer: Any) -> list[str]:
    """What an answer column holds: plain, in \\boxed{…}, behind `####`, or several of them."""
    several = isinstance(answer, Sequence) and not isinstance(answer, str)
    found = [_gold_text(str(one)) for one in (answer if several else [answer])]
    if not found or not all(found):
        raise ValueError("the answer is empty")
    return found


def _gold_text(text: str) -> str:
    marked = hashed(text) or boxed(text)
    return text.strip() if marked is None else marked


def final_expression(reply: str) -> str:
    """The final answer of a reply: in the last \\boxed{…} or <answer>, behind `####` or `answer is`, the whole of a
    reply that is nothing but an expression, or its last number with what belongs to it."""
    inside = boxed(reply)
    if inside is None:
        inside = tagged(reply) or hashed(reply)
        inside = None if inside is None else boxed(inside) or inside
    if inside is not None:
        return inside
    if BOX.search(reply):
        return ""  # opened and never closed: cut off in the middle of its answer
    behind = stated(reply)
    if behind is not None:
        return _expression_in(SENTENCE.split(behind[:LONGEST], maxsplit=1)[0], first=True)
    return _expression_in(reply.strip()[-LONGEST:], first=False)


def _expression_in(text: str, first: bool) -> str:
    """The expression in a text that may hold words around it."""
    if _is_answer(text):
        return text
    segments = [next(part for part in found if part) for found in SEGMENT.findall(text)]
    if segments and (first or LAST.search(SEGMENT.split(text)[-1] or "") is None):
        return segments[0 if first else -1]
    numbers = list(LAST.finditer(text))
    return text if not numbers else _with_neighbours(text, numbers[-1])


def _is_answer(text: str) -> bool:
    """No prose: one that this file can read, formulas without words, or up to three words without a number."""
    if value(quantity(tidy(text)).body) is not None or CHOICE.match(plain_choice(text)):
        return True
    prose = [word for word in WORD.findall(NO_PROSE.sub(" ", text)) if word.lower() not in ("and", "or")]
    return "\n" not in text and (not prose or (len(text.split()) <= 3 and not re.search(r"\d", text)))


def _with_neighbours(text: str, found: re.Match[str]) -> str:
    """A number inside 3\\sqrt{2} or x^2 is not the answer: all that hangs on it is."""
    start, end = found.start(), found.end()
    before, after = text[:start].rstrip("$"), text[end:]
    if re.search(r"[\\{}^_(*/A-Za-z]$", before) or re.match(r"[\\{}^_*/]|[A-Za-z]", after):
        start = max(before.rfind(" "), before.rfind("\n"), before.rfind("=")) + 1
        end += len(re.split(r"[\s]", after, maxsplit=1)[0])
    return text[start:end]
