"""Whether two answers are equal: first by their structure, then expression by expression.

    compare("1,2", "2,1", {})                (True, [])
    compare("(\\sin 2x,1)", "(2\\sin x\\cos x,1)", {})      (None, [("\\sin 2x", "2\\sin x\\cos x")])

Lists, sets, tuples, intervals, unions and matrices are taken apart here; only what is left open about two single
expressions, or about two ways to write a set of numbers, is a question for math-verify. Alone, it would overlook how
often an item is listed, number bases, primes, dots and words behind a number.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from covey.rewards.math.algebra import SYMBOLS, NotAlgebra, Ratio, number, parse
from covey.rewards.math.latex import CHANGING, TEXT, Quantity, listed, quantity, same_numeral, tidy, words_only

Pair = tuple[str, str]

THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)|\\[{}]|[][(){}]")
IN_FRACTION = re.compile(r"(?<=\{)\d{1,3}(?:,\d{3})+(?=\})")
LETTER = rf"(?:[A-Za-z]|\\(?:{'|'.join(sorted(SYMBOLS))}))'*(?:_\{{?\w+\}}?)?"
LABEL = re.compile(
    rf"({LETTER}(?:\([A-Za-z]\))?|\({LETTER}(?:,{LETTER})+\))(?:=|\\in(?![A-Za-z]))(?=[^=])"  # (x,y)=(1,2)
)
CHOICE = re.compile(r"\(([A-J])\)(?=\s|$)|([A-J])(?:[.):](?=\s|$)|$)")
JOINTS = re.compile(r",?\\text\{(?:and|or)\}|;")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
BRACKET = r"\\begin\{[a-z]+\*?\}|\\end\{[a-z]+\*?\}|\\[{}]|[][(){}]"
RELATIONS = {
    "strict": re.compile(r"[<>]"),
    "weak": re.compile(r"\\[lg]e(?![A-Za-z])"),
    "unequal": re.compile(r"\\ne(?![A-Za-z])|\\not"),
}
OVERLOOKED = re.compile(r"[A-Za-z)\]]\^?\{?'+|\\[a-z]?dots|\.\.\.")  # primes, dots
LONGEST = 2000  # characters of a reply, and four times the answer's
MAX_COMPARISONS = 1000  # of parts of two answers, and one for each character of the gold answer
MAX_DEPTH = 30  # brackets in brackets
CLOSE = Fraction(1, 10_000)  # numbers nearer than this may be roundings of each other
ROUNDED = Fraction(1, 20)  # two sides of `1/3 = 0.33` may be that far apart


def equal(gold: str, reply: str) -> bool | None:
    """True: equal. False: different. None: not known to be equal, but math-verify may show that they are."""
    return compare(gold, reply, {})[0]


def compare(gold: str, reply: str, verdicts: Mapping[Pair, bool]) -> tuple[bool | None, list[Pair]]:
    """Whether they are equal, given what is known about pairs of their parts; and the pairs that are still open."""
    if len(reply) > LONGEST + 4 * len(gold):
        return False, []
    ours, theirs = tidy(reply), tidy(gold)
    if not ours:
        return False, []
    if ours == theirs or ((names := listed(theirs)) is not None and names == listed(ours)):
        return True, []
    letter = CHOICE.fullmatch(plain_choice(gold))
    if letter is not None and (said := CHOICE.match(plain_choice(reply))) is not None:
        return (said[1] or said[2]) == (letter[1] or letter[2]), []
    if (words := words_only(theirs)) is not None:
        return words == words_only(ours), []
    comparison = Comparison(verdicts, MAX_COMPARISONS + len(gold))
    found = [comparison.same(one, other) for one in _readings(theirs) for other in _readings(ours)]
    verdict = True if True in found else None if None in found else False
    return verdict, list(comparison.open) if verdict is None else []


def plain_choice(text: str) -> str:
    """For letters of a choice, which may have their text behind them: `\\textbf{(B)} 12`."""
    return TEXT.sub(r"\1", text).strip("{}$* ").removesuffix(".")


def _readings(text: str) -> list[str]:
    """`1,200` is a list of two, or one number: then without its commas. Inside brackets it is two."""
    depth, parts, start = 0, [], 0
    for found in GROUPED.finditer(text):
        if found[0][-1] in "([{":
            depth += 1
        elif found[0][-1] in ")]}":
            depth -= 1
        elif depth == 0:
            parts += [text[start : found.start()], found[0].replace(",", "")]
            start = found.end()
    return [text, "".join([*parts, text[start:]])] if parts else [text]


# -- structure ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parts:
    """`kind` is list, set, union, matrix, the two brackets of a tuple or interval, or one (expression)."""

    kind: str
    items: tuple[str, ...]
    rows: tuple[int, ...] = ()  # of a matrix: their lengths

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of `x=1,y=2`. Empty where not every item has one of its own."""
        found = [LABEL.match(item) for item in self.items]
        names = tuple(one[1] for one in found if one is not None)
        return names if len(names) == len(set(names)) == len(self.items) > 1 else ()


@functools.lru_cache(maxsize=1024)
def parts_of(text: str) -> Parts:
    """`x=2,-3` is two values of x; `\\pm` is two values."""
    label = LABEL.match(text)
    body = text[label.end() :] if label is not None and "=" not in text[label.end() :] else text
    kind = "list"
    if body.startswith("\\{") and body.endswith("\\}") and _encloses(body):
        body, kind = body[2:-2], "set"
    body = JOINTS.sub(",", _without_brackets(body))
    items = tuple(item for item in split(body, ",") if item)
    if len(items) > 1:
        return Parts(kind, items)
    if len(items) == 1 and items[0].count("\\pm") == 1:
        return Parts(kind, tuple(items[0].replace("\\pm", sign).removeprefix("+") for sign in "+-"))
    if len(pieces := split(body, "\\cup")) > 1:
        return Parts("union", tuple(pieces))
    if (found := re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", body)) is not None:
        # Rows end in `\\`; some data lost one of the two strokes before a number.
        rows = [row.split("&") for row in re.split(r"\\\\|\\(?=[-\d.])", found[1]) if row]
        return Parts("matrix", tuple(cell for row in rows for cell in row), tuple(len(row) for row in rows))
    if (inside := _bracketed(body)) is not None:
        return Parts(body[0] + body[-1], inside)
    return Parts("one", (items[0] if kind == "set" and items else text,))


def split(text: str, mark: str) -> list[str]:
    """At `mark`, outside brackets and environments."""
    parts, depth, start = [], 0, 0
    for found in re.finditer(f"{re.escape(mark)}|{BRACKET}", text):
        if found[0] == mark:
            if depth == 0:
                parts.append(text[start : found.start()])
                start = found.end()
        else:
            depth += _step(found[0])
    return [*parts, text[start:]]


def _step(bracket: str) -> int:
    return 1 if bracket.startswith("\\begin") or bracket[-1] in "([{" else -1


def _encloses(text: str) -> bool:
    """Whether the bracket at the beginning is closed by the one at the end."""
    depth = 0
    for found in re.finditer(BRACKET, text):
        depth += _step(found[0])
        if depth <= 0:
            return depth == 0 and found.end() == len(text)
    return False


def _bracketed(text: str) -> tuple[str, ...] | None:
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]" or not _encloses(text):
        return None
    items = split(text[1:-1], ",")
    return tuple(items) if len(items) > 1 else None


def _without_brackets(text: str) -> str:
    """`((a,b))` is `(a,b)`, and a union may have brackets around it."""
    for _ in range(3):
        if text.startswith("(") and _encloses(text):
            inside = text[1:-1]
            text = inside if _encloses(inside) or len(split(inside, "\\cup")) > 1 else text
    return text


def _value_side(text: str) -> str:
    return LABEL.sub("", text, count=1) if LABEL.match(text) else text


def _chain(gold: str, reply: str) -> list[str]:
    """The sides of `2+3=5`, or of `x=2+3=5` where the gold answer is not an equation in something else."""
    own, label = LABEL.match(gold), LABEL.match(reply)
    if "=" in _value_side(gold) or (own is not None and (label is None or own[1] != label[1])):
        return []
    sides = split(_value_side(reply), "=")
    return sides if len(sides) > 1 else []


def _is_region(text: str, parts: Parts) -> bool:
    """It may be a set of numbers: an interval, a union, an inequality, the real numbers."""
    if parts.kind == "one":
        return "\\mathbb" in text or (bool(_relations(text)) and not re.search(r"[(\[][^()\[\]]*,", text))
    return parts.kind == "union" or (len(parts.items) == 2 and parts.kind in ("()", "[]", "(]", "[)"))


@dataclass
class Comparison:
    """Three-valued: None where it depends on pairs that are not in `verdicts`; those are collected in `open`."""

    verdicts: Mapping[Pair, bool]
    left: int  # comparisons: past this, unequal
    open: dict[Pair, None] = field(default_factory=dict)
    depth: int = 0

    def same(self, gold: str, reply: str) -> bool | None:
        if gold == reply:
            return True
        self.left -= 1
        if self.left < 0 or self.depth > MAX_DEPTH:
            return False
        self.depth += 1
        try:
            return self._same_parts(gold, reply)
        finally:
            self.depth -= 1

    def _same_parts(self, gold: str, reply: str) -> bool | None:
        theirs, ours = parts_of(gold), parts_of(reply)
        if ours.kind == "one" and (sides := _chain(gold, reply)):
            return self._same_chain(_value_side(gold), sides)
        if theirs.kind == ours.kind == "one":
            return self._same_expression(theirs.items[0], ours.items[0])
        lists = {"list", "set"}
        if theirs.kind in lists and ours.kind in lists:
            return self._same_list(theirs, ours)
        if theirs.kind == ours.kind == "union":
            found = self._matched(theirs.items, ours.items)
            return found if found else self._ask(gold, reply)
        if theirs.kind == ours.kind:
            return self._in_order(theirs, ours) if theirs.rows == ours.rows else False
        if {theirs.kind, ours.kind} == {"list", "()"}:
            # A pair without its brackets, and a list in brackets. Only a pair of the gold answer has an order.
            ordered = theirs.kind == "()" or theirs.labels
            return self._in_order(theirs, ours) if ordered else self._matched(theirs.items, ours.items)
        if {theirs.kind, ours.kind} & {"one", "union"} and _is_region(gold, theirs) and _is_region(reply, ours):
            return self._ask(gold, reply)
        return False

    def _ask(self, gold: str, reply: str) -> bool | None:
        theirs, ours = quantity(gold), quantity(reply)
        if theirs.scale != ours.scale or _overlooked(theirs.body) != _overlooked(ours.body):
            return False
        if (gold, reply) in self.verdicts:
            return self.verdicts[gold, reply]
        self.open[gold, reply] = None
        return None

    # -- several items ---------------------------------------------------------------------------------------------

    def _same_list(self, gold: Parts, reply: Parts) -> bool | None:
        if gold.labels and reply.labels:
            if set(gold.labels) != set(reply.labels):
                return False
            ours = dict(zip(reply.labels, reply.items, strict=True))
            reply = Parts(reply.kind, tuple(ours[label] for label in gold.labels))
            return self._in_order(gold, reply)
        if gold.labels or reply.labels:
            return self._in_order(gold, reply)
        return self._matched(gold.items, reply.items)

    def _in_order(self, gold: Parts, reply: Parts) -> bool | None:
        if len(gold.items) != len(reply.items):
            return False
        open_ = False
        for one, other in zip(gold.items, reply.items, strict=True):
            found = self.same(_value_side(one) if gold.labels else one, _value_side(other) if reply.labels else other)
            if found is False:
                return False
            open_ |= found is None
        return None if open_ else True

    def _matched(self, gold: Sequence[str], reply: Sequence[str]) -> bool | None:
        """In any order, each as often as in the other. Equal spellings and equal numbers are paired without comparing
        each with each."""
        if len(gold) != len(reply):
            return False
        unpaired, left = _unpaired(gold, reply)
        open_ = False
        for item in unpaired:
            verdict: bool | None = False
            for place, other in enumerate(left):
                found = self.same(item, other)
                if found:
                    del left[place]
                    verdict = True
                    break
                verdict = None if found is None else verdict
            if verdict is False:
                return False
            open_ |= verdict is None
        return None if open_ else True

    # -- one expression --------------------------------------------------------------------------------------------

    def _same_expression(self, gold: str, reply: str) -> bool | None:
        label, own = LABEL.match(gold), LABEL.match(reply)
        if _relations(gold) != _relations(reply):
            return False
        if label is not None and own is not None and label[1] != own[1]:
            return self._ask(gold, reply)
        right, said = _value_side(gold), _value_side(reply)
        if (verdict := same_numeral(right, said)) is not None:
            return verdict
        theirs, ours = quantity(right), quantity(said)
        if ours.unit is not None and theirs.unit is not None and ours.unit != theirs.unit:
            return False
        verdict = _same_quantity(theirs, ours)
        if verdict is not None:
            return verdict
        # `x=5` is not met by `2x=5`, whose right side is the same.
        return self._ask(gold, reply) if label is not None and "=" in said else self._ask(right, said)

    def _same_chain(self, gold: str, sides: Sequence[str]) -> bool | None:
        """`2+3=5` says 5; `6=5` and `x>2=5` say nothing."""
        sizes = [size for side in sides if (size := _near(side)) is not None]
        apart = sizes and max(sizes) - min(sizes) > ROUNDED * max(Fraction(1), *map(abs, sizes))
        if apart or any(_relations(side) for side in sides[:-1]):
            return False
        return self.same(gold, sides[-1])


# -- numbers and algebra -----------------------------------------------------------------------------------------------


def _unpaired(gold: Sequence[str], reply: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is left of both once equal spellings and equal numbers are paired."""
    keys = [_key(item) for item in gold], [_key(item) for item in reply]
    common, left = Counter(keys[0]) & Counter(keys[1]), []
    for items, own in zip((gold, reply), keys, strict=True):
        paired, rest = Counter[Fraction | str](), []
        for item, key in zip(items, own, strict=True):
            if paired[key] < common[key]:
                paired[key] += 1
            else:
                rest.append(item)
        left.append(rest)
    return left[0], left[1]


def _key(text: str) -> Fraction | str:
    """A rational number is its value; anything else is its text."""
    found = quantity(text)
    own = value(found.body) if found.unit is None and not found.percent else None
    size = own.rational() if own is not None else None
    return text if size is None else size * found.scale


def _near(text: str) -> Fraction | None:
    """Nearly the value of a text that is a number."""
    found = quantity(text)
    own = value(found.body)
    size = None if own is None else own.rational() or own.approximate()
    return None if size is None or found.percent else Fraction(size) * found.scale


def _relations(text: str) -> set[str]:
    return {kind for kind, pattern in RELATIONS.items() if pattern.search(text)}


def _overlooked(text: str) -> set[str]:
    """What equal expressions share and math-verify overlooks: primes, dots, texts, and words that change a number."""
    inside = re.findall(r"[a-z]{2,}", " ".join(TEXT.findall(text)).lower())  # (P) is a letter, with or without \text
    plain = re.findall(r"[a-z]+", re.sub(r"\\[A-Za-z]+", " ", text.lower()))
    return {*OVERLOOKED.findall(text), *inside, *(CHANGING & set(plain))}


def _same_quantity(gold: Quantity, reply: Quantity) -> bool | None:
    right, said = value(gold.body), value(reply.body)
    if right is None or said is None:
        same = (reply.body, reply.percent, reply.scale) == (gold.body, gold.percent, gold.scale)
        return (same and bool(reply.body)) or None
    try:
        return _same_value(right, gold, said, reply)
    except NotAlgebra:  # too large together
        return None


def _same_value(right: Ratio, theirs: Quantity, said: Ratio, ours: Quantity) -> bool | None:
    right, said = right * number(theirs.scale), said * number(ours.scale)
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


@functools.lru_cache(maxsize=1024)
def value(body: str) -> Ratio | None:
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
