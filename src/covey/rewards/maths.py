"""Rewards for answers that are mathematics.

`math_equal` compares exactly and at once: numbers, fractions, mixed numbers, percentages, surds, polynomials, tuples,
intervals, sets, matrices, letters of a choice, and else the text in one spelling. `math_verify` asks the package of
that name about what is left open, in a process that can be killed.

Deliberate: an unknown unit, or one that only one side writes, does not count; two known units must be the same. `50%`
is met by 50 and by 0.5. `x = 5` is met by 5. Lists without brackets, and sets, have no order; a reply must hold all.
Decimals are exact: 0.33 is not 1/3.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from covey.errors import Absent
from covey.rewards import math_process
from covey.rewards.algebra import NotAlgebra, Ratio, number, parse
from covey.rewards.answers import BOX, boxed, hashed, stated, tagged
from covey.rewards.function import reward
from covey.rewards.latex import TEXT, Quantity, listed, quantity, tidy, words_only
from covey.types import Task

THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
IN_FRACTION = re.compile(r"(?<=\{)\d{1,3}(?:,\d{3})+(?=\})")
LABEL = re.compile(r"(?:([A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))?|\\[a-z]+)(?:=|\\in(?![A-Za-z])))(?=[^=])")
CHOICE = re.compile(r"\(([A-J])\)(?=\s|$)|([A-J])(?:[.):](?=\s|$)|$)")
JOINTS = re.compile(r",?\\text\{(?:and|or)\}|;")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
NO_PROSE = re.compile(TEXT.pattern + r"|\\(?:begin|end)\{[a-z]+\}")
SEGMENT = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
LAST = re.compile(
    r"(?:(?<![\w.)\]}%])[-−]\s?)?[$€£]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:\s?/\s?\d+(?:\.\d+)?)?%?"
)
SENTENCE = re.compile(r"(?<!\d)\.\s|\.\s(?=[A-Z])|\s(?:because|since)\s")
LONGEST = 2000  # characters of an answer, and in which one without a mark is looked for
CLOSE = Fraction(1, 10_000)  # numbers nearer than this may be roundings of each other


@reward(gold=lambda answer: gold_texts(answer))
def math_equal(answer: Any, final_answer: str) -> float:
    """1 if the final answer of the reply equals the answer, exactly. `answer` may be a list of acceptable ones."""
    reply = final_expression(final_answer)
    return float(any(equal(gold, reply) is True for gold in gold_texts(answer)))


def _check(task: Task) -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise Absent("reward math_verify needs the package math-verify\n  fix: pip install 'covey[math]'")


@reward(check=_check, gold=lambda answer: gold_texts(answer))
async def math_verify(answer: Any, final_answer: str, deadline: float = 5.0) -> dict[str, float]:
    """The same, and where that leaves it open, what math-verify says within `deadline` seconds.

    Extra `timeout`: 1 where it took longer, which is then not equal: the model wrote the expression.
    """
    reply, golds = final_expression(final_answer), gold_texts(answer)
    verdicts = [equal(gold, reply) for gold in golds]
    if True in verdicts:
        return {"reward": 1.0, "timeout": 0.0}
    late = False
    for gold in (gold for gold, verdict in zip(golds, verdicts, strict=True) if verdict is None and reply):
        found = await math_process.verify(tidy(gold), tidy(reply), deadline)
        if found:
            return {"reward": 1.0, "timeout": 0.0}
        late |= found is None
    return {"reward": 0.0, "timeout": float(late)}


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
    if _value(quantity(tidy(text)).body) is not None or CHOICE.match(_plain(text)):
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


def equal(gold: str, reply: str) -> bool | None:
    """True: equal. False: two numbers, words, letters of a choice or known units that differ. None: not known to
    be equal, but more than this file knows may show that they are."""
    if len(reply) > LONGEST + 4 * len(gold):
        return False
    ours, theirs = tidy(reply), tidy(gold)
    if not ours:
        return False
    if ours == theirs or ((names := listed(theirs)) is not None and names == listed(ours)):
        return True
    letter = CHOICE.fullmatch(_plain(gold))
    if letter is not None and (said := CHOICE.match(_plain(reply))) is not None:
        return (said[1] or said[2]) == (letter[1] or letter[2])
    if (words := words_only(theirs)) is not None:
        return words == words_only(ours)
    return _same(theirs, ours)


def _plain(text: str) -> str:
    """For letters of a choice, which may have their text behind them: `\\textbf{(B)} 12`."""
    return TEXT.sub(r"\1", text).strip("{}$* ").removesuffix(".")


def _same(gold: str, reply: str) -> bool | None:
    if gold == reply:
        return True
    for compare in (_same_list, _same_union, _same_brackets, _same_matrix):
        verdict = compare(gold, reply)
        if verdict is not None:
            return verdict or None
    return _same_scalar(gold, reply)


def _same_list(gold: str, reply: str) -> bool | None:
    """Lists without brackets, and sets. None: neither is one."""
    ours, theirs = _items(reply), _items(gold)
    if len(ours) == 1 or len(theirs) == 1:
        thousands = any(THOUSANDS.fullmatch(quantity(text).body) for text in (gold, reply))
        return None if thousands or len(ours) == len(theirs) else False
    if all(THOUSANDS.fullmatch(quantity(text).body) for text in (gold, reply)):
        return None
    labels = [{found[1] for item in items if (found := LABEL.match(item))} for items in (ours, theirs)]
    if labels[0] != labels[1] and max(map(len, labels)) > 1:
        return False
    return _matched(theirs, ours)


def _items(text: str) -> list[str]:
    """`x=2,-3` is two values of x; `\\pm` is two values."""
    label = LABEL.match(text)
    body = text[label.end() :] if label is not None and "=" not in text[label.end() :] else text
    if body.startswith("\\{") and body.endswith("\\}"):
        body = body[2:-2]
    items = [item for item in _split(JOINTS.sub(",", body), ",") if item]
    if len(items) == 1 and items[0].count("\\pm") == 1:
        return [items[0].replace("\\pm", sign).removeprefix("+") for sign in "+-"]
    return items or [body]


def _split(text: str, mark: str) -> list[str]:
    """At `mark`, outside brackets."""
    parts, depth, start = [], 0, 0
    for found in re.finditer(re.escape(mark) + r"|\\[{}]|[][(){}]", text):
        if found[0] == mark:
            if depth == 0:
                parts.append(text[start : found.start()])
                start = found.end()
        else:
            depth += 1 if found[0][-1] in "([{" else -1
    return [*parts, text[start:]]


def _matched(gold: Sequence[str], reply: Sequence[str]) -> bool:
    if len(gold) != len(reply):
        return False
    left = list(reply)
    for item in gold:
        place = next((i for i, other in enumerate(left) if _same(item, other) is True), None)
        if place is None:
            return False
        del left[place]
    return True


def _same_union(gold: str, reply: str) -> bool | None:
    ours, theirs = _split(_value_side(reply), "\\cup"), _split(_value_side(gold), "\\cup")
    return None if len(ours) == len(theirs) == 1 else _matched(theirs, ours)


def _value_side(text: str) -> str:
    return LABEL.sub("", text, count=1) if LABEL.match(text) else text


def _same_brackets(gold: str, reply: str) -> bool | None:
    """Tuples and intervals: the same brackets, the same things in the same order."""
    ours, theirs = _bracketed(_value_side(reply)), _bracketed(_value_side(gold))
    if ours is None or theirs is None:
        return None if ours is theirs else False
    return ours[0] == theirs[0] and len(ours[1]) == len(theirs[1]) and all(_all_same(theirs[1], ours[1]))


def _bracketed(text: str) -> tuple[str, list[str]] | None:
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]" or text.endswith(("\\)", "\\]")):
        return None
    items = _split(text[1:-1], ",")
    return (text[0] + text[-1], items) if len(items) > 1 else None


def _all_same(gold: Sequence[str], reply: Sequence[str]) -> list[bool]:
    return [_same(one, other) is True for one, other in zip(gold, reply, strict=True)]


def _same_matrix(gold: str, reply: str) -> bool | None:
    ours, theirs = _matrix(_value_side(reply)), _matrix(_value_side(gold))
    if ours is None or theirs is None:
        return None if ours is theirs else False
    if [len(row) for row in ours] != [len(row) for row in theirs]:
        return False
    return all(all(_all_same(one, other)) for one, other in zip(theirs, ours, strict=True))


def _matrix(text: str) -> list[list[str]] | None:
    """Rows end in `\\\\`; some data lost one of the two strokes before a number."""
    found = re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", text)
    return [row.split("&") for row in re.split(r"\\\\|\\(?=[-\d.])", found[1]) if row] if found else None


def _same_scalar(gold: str, reply: str) -> bool | None:
    labels = [LABEL.match(text) for text in (gold, reply)]
    if labels[0] is not None and labels[1] is not None and labels[0][1] != labels[1][1]:
        return None
    theirs, ours = quantity(_value_side(gold)), quantity(_value_side(reply))
    if ours.unit is not None and theirs.unit is not None and ours.unit != theirs.unit:
        return False
    right, said = _value(theirs.body), _value(ours.body)
    if right is None or said is None:
        same = (ours.body, ours.percent, ours.scale) == (theirs.body, theirs.percent, theirs.scale)
        return (same and bool(ours.body)) or None
    try:
        return _same_value(right, theirs, said, ours)
    except NotAlgebra:  # too large together
        return None


def _same_value(right: Ratio, theirs: Quantity, said: Ratio, ours: Quantity) -> bool | None:
    right, said = right * number(Fraction(theirs.scale)), said * number(Fraction(ours.scale))
    if right == said:
        return True
    if ours.percent == theirs.percent:
        return _clearly_apart(right, said)
    hundredth = number(Fraction(1, 100))
    return (said * hundredth == right if ours.percent else right * hundredth == said) or None


def _clearly_apart(a: Ratio, b: Ratio) -> bool | None:
    one, other = a.rational(), b.rational()
    if one is not None and other is not None:
        return False if abs(one - other) > CLOSE * max(Fraction(1), abs(one)) else None
    near, far = a.approximate(), b.approximate()
    if near is None or far is None:
        return None
    return False if abs(near - far) > float(CLOSE) * max(1.0, abs(near)) else None


def _value(body: str) -> Ratio | None:
    """Its exact value, if it is algebra. Three letters in a row are a word."""
    if THOUSANDS.fullmatch(body):
        body = body.replace(",", "")
    elif "\\frac" in body:
        body = IN_FRACTION.sub(lambda found: found[0].replace(",", ""), body)
    if WORD.search(body):
        return None
    try:
        return parse(body)
    except NotAlgebra:
        return None
