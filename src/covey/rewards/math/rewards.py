"""The rewards `math_equal` and `math_verify`, for mathematical answers.

`math_equal` compares exactly and immediately (`equality.py`):
numbers, fractions, mixed numbers, percentages, surds, polynomials, numbers with a base, tuples, intervals, sets,
matrices, multiple-choice letters, and otherwise the normalized text. `math_verify` sends what remains undecided to the
package math-verify, in a process that can be killed.

The exact comparison comes first because most answers are decided by it, and sympy, which math-verify uses, is slower
and may never return.

Conventions: an unknown unit, or a unit that only one side has, is ignored; two known units must agree. `50%` matches 50
and 0.5. `x = 5` matches 5, and 5 matches `2+3 = 5`. Lists without brackets and sets are unordered, but every item must
occur equally often. Decimals are exact: 0.33 is not 1/3. `52_8` does not match 52.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from covey.errors import Absent
from covey.imports import install_extra
from covey.rewards.answers import BOX, boxed, hashed, stated, tagged
from covey.rewards.function import inline, reward
from covey.rewards.math import verify_process
from covey.rewards.math.equality import CHOICE, MAX_LENGTH, WORD, Pair, compare, equal, plain_choice, value
from covey.rewards.math.latex import TEXT, quantity, tidy
from covey.types import Task

NO_PROSE = re.compile(TEXT.pattern + r"|\\(?:begin|end)\{[a-z]+\}")
SEGMENT = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
LAST = re.compile(
    r"(?:(?<![\w.)\]}%])[-−]\s?)?[$€£]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:\s?/\s?\d+(?:\.\d+)?)?%?"
)
DENIED = re.compile(  # "not 5", "and not $x$", "cannot be 5": a value that the reply rules out
    r"[,;]? ?(?:\b(?:and|but) )?(?:(?<!\\)\bnot|\bcannot|n['’]t)(?: be)?(?: equal(?: to)?)? "
    r"(?:\$\$?[^$\n]{1,200}\$\$?|\\\(.{1,200}?\\\)|\\\[.{1,200}?\\\]|(?:\*\*)?[-−+]?[\d(\\]\S*?)(?=[.,;:!?]?(?:\s|$))",
    re.IGNORECASE,
)
SENTENCE = re.compile(r"(?<!\d)\.\s|\.\s(?=[A-Z])|\s(?:because|since)\s")
MAX_QUERIES = 20  # to math-verify per answer


@inline
@reward(gold=lambda answer: gold_texts(answer))
def math_equal(answer: Any, final_answer: str) -> float:
    """1 if the final answer of the reply equals the answer exactly. `answer` may be a list of acceptable answers."""
    reply = final_expression(final_answer)
    return float(any(equal(gold, reply) is True for gold in gold_texts(answer)))


def _check(task: Task) -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise Absent(f"reward math_verify needs the package math-verify\n  fix: {install_extra('math')}")


@inline
@reward(check=_check, gold=lambda answer: gold_texts(answer))
async def math_verify(answer: Any, final_answer: str, deadline: float = 5.0) -> dict[str, float]:
    """Like `math_equal`, with undecided pairs of expressions sent to math-verify, each for up to `deadline` seconds.

    Extra `timeout`: 1 if math-verify took longer. Such an answer counts as wrong, because the model wrote it.
    """
    reply, golds = final_expression(final_answer), gold_texts(answer)
    if any(equal(gold, reply) for gold in golds):
        return {"reward": 1.0, "timeout": 0.0}
    timeout = False
    for gold in golds:
        verdict = await _verify(gold, reply, deadline)
        if verdict:
            return {"reward": 1.0, "timeout": 0.0}
        timeout |= verdict is None
    return {"reward": 0.0, "timeout": float(timeout)}


async def _verify(gold: str, reply: str, deadline: float) -> bool | None:
    """Query math-verify about one undecided pair after another until the answer is decided. None: a query timed out."""
    verdicts: dict[Pair, bool] = {}
    verdict, pairs = compare(gold, reply, verdicts)
    while verdict is None and pairs and len(verdicts) < MAX_QUERIES:
        equal_pair = await verify_process.verify(*pairs[0], deadline)
        if equal_pair is None:
            return None
        verdicts[pairs[0]] = equal_pair
        verdict, pairs = compare(gold, reply, verdicts)
    return bool(verdict)


def gold_texts(answer: Any) -> list[str]:
    """The acceptable answers in an answer column: one or a list, each plain, in \\boxed{…} or after `####`."""
    several = isinstance(answer, Sequence) and not isinstance(answer, str)
    texts = [_gold_text(str(one)) for one in (answer if several else [answer])]
    if not texts or not all(texts):
        raise ValueError("the answer is empty")
    return texts


def _gold_text(text: str) -> str:
    marked = hashed(text) or boxed(text)
    return text.strip() if marked is None else marked


def final_expression(reply: str) -> str:
    """The final answer of a reply: in the last \\boxed{…} or <answer>, after `####` or `answer is`, the whole reply if
    it is only an expression, or else the expression around its last number. Values after `not` do not count."""
    inside = boxed(reply)
    if inside is None:
        inside = tagged(reply) or hashed(reply)
        inside = None if inside is None else boxed(inside) or inside
    if inside is not None:
        return inside
    if BOX.search(reply):
        return ""  # an unclosed box: the reply was cut off within its answer
    reply = DENIED.sub("", reply)
    statement = stated(reply)
    if statement is not None:
        return _expression_in(SENTENCE.split(statement[:MAX_LENGTH], maxsplit=1)[0], first=True)
    return _expression_in(reply.strip()[-MAX_LENGTH:], first=False)


def _expression_in(text: str, first: bool) -> str:
    """The expression in a text that may have words around it."""
    if _is_answer(text):
        return text
    segments = [next(part for part in groups if part) for groups in SEGMENT.findall(text)]
    if segments and (first or LAST.search(SEGMENT.split(text)[-1] or "") is None):
        return segments[0 if first else -1]
    numbers = list(LAST.finditer(text))
    return text if not numbers else _with_neighbours(text, numbers[-1])


def _is_answer(text: str) -> bool:
    """Whether a text is an answer without prose: a readable value, formulas without words, or up to three words without
    a number."""
    if value(quantity(tidy(text)).body) is not None or CHOICE.match(plain_choice(text)):
        return True
    prose = [word for word in WORD.findall(NO_PROSE.sub(" ", text)) if word.lower() not in ("and", "or")]
    return "\n" not in text and (not prose or (len(text.split()) <= 3 and not re.search(r"\d", text)))


def _with_neighbours(text: str, match: re.Match[str]) -> str:
    """The whole expression around a number, such as 3\\sqrt{2} or x^2."""
    start, end = match.start(), match.end()
    before, after = text[:start].rstrip("$"), text[end:]
    if re.search(r"[\\{}^_(*/A-Za-z]$", before) or re.match(r"[\\{}^_*/]|[A-Za-z]", after):
        start = max(before.rfind(" "), before.rfind("\n"), before.rfind("=")) + 1
        end += len(re.split(r"[\s]", after, maxsplit=1)[0])
    return text[start:end]
