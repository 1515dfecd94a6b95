"""Rewards for answers that are mathematics.

`math_equal` compares exactly and at once (`equality.py`): numbers, fractions, mixed numbers, percentages, surds,
polynomials, numbers with a base, tuples, intervals, sets, matrices, letters of a choice, and else the text in one
spelling. `math_verify` asks the package of that name about expressions that are left open, in a process that can be
killed.

Deliberate: an unknown unit, or one that only one side writes, does not count; two known units must be the same. `50%`
is met by 50 and by 0.5. `x = 5` is met by 5, and 5 by `2+3 = 5`. Lists without brackets, and sets, have no order; a
reply must hold each item as often as the gold answer. Decimals are exact: 0.33 is not 1/3. `52_8` is not met by 52.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from covey.errors import Absent
from covey.install import install_extra
from covey.rewards import math_process
from covey.rewards.answers import BOX, boxed, hashed, stated, tagged
from covey.rewards.equality import CHOICE, LONGEST, WORD, Pair, compare, equal, plain_choice, value
from covey.rewards.function import reward
from covey.rewards.latex import TEXT, quantity, tidy
from covey.types import Task

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
        found = await math_process.verify(*pairs[0], deadline)
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
