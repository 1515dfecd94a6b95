"""Compare two mathematical answers exactly: first their structure, then each pair of expressions.

    compare("1,2", "2,1", {})                                        (True, [])
    compare("(\\sin 2x,1)", "(2\\sin x\\cos x,1)", {})              (None, [("\\sin 2x", "2\\sin x\\cos x")])

Lists, sets, tuples, intervals, unions and matrices are split into parts here. Only undecided pairs of single
expressions, or of two notations for a set of numbers, go to math-verify, which alone would ignore multiplicities,
number bases, primes, dots and words after a number.
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
SEPARATORS = re.compile(r",?\\text\{(?:and|or)\}|;")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
BRACKET = r"\\begin\{[a-z]+\*?\}|\\end\{[a-z]+\*?\}|\\[{}]|[][(){}]"
RELATIONS = {
    "strict": re.compile(r"[<>]"),
    "weak": re.compile(r"\\[lg]e(?![A-Za-z])"),
    "unequal": re.compile(r"\\ne(?![A-Za-z])|\\not"),
}
IGNORED = re.compile(r"[A-Za-z)\]]\^?\{?'+|\\[a-z]?dots|\.\.\.")  # primes, dots
MAX_LENGTH = 2000  # characters of a reply, plus four times the gold answer's
MAX_COMPARISONS = 1000  # of parts of two answers, plus one per character of the gold answer
MAX_DEPTH = 30  # nested brackets
CLOSE = Fraction(1, 10_000)  # relative distance; closer numbers may be roundings of each other
ROUNDED = Fraction(1, 20)  # relative distance allowed between the sides of `1/3 = 0.33`


def equal(gold: str, reply: str) -> bool | None:
    """True: equal. False: different. None: undecided, math-verify may show that they are equal."""
    return compare(gold, reply, {})[0]


def compare(gold: str, reply: str, verdicts: Mapping[Pair, bool]) -> tuple[bool | None, list[Pair]]:
    """Whether they are equal, given verdicts about pairs of their parts; and the pairs that are still undecided."""
    if len(reply) > MAX_LENGTH + 4 * len(gold):
        return False, []
    max_comparisons = MAX_COMPARISONS + len(gold)
    letter, reply_letter = CHOICE.fullmatch(plain_choice(gold)), CHOICE.match(plain_choice(reply))
    gold, reply = tidy(gold), tidy(reply)
    if not reply:
        return False, []
    if reply == gold or ((names := listed(gold)) is not None and names == listed(reply)):
        return True, []
    if letter is not None and reply_letter is not None:
        return (reply_letter[1] or reply_letter[2]) == (letter[1] or letter[2]), []
    if (words := words_only(gold)) is not None:
        return words == words_only(reply), []
    comparison = Comparison(verdicts, max_comparisons)
    results = [comparison.same(one, other) for one in _readings(gold) for other in _readings(reply)]
    verdict = True if True in results else None if None in results else False
    return verdict, list(comparison.open) if verdict is None else []


def plain_choice(text: str) -> str:
    """The text to search for a multiple-choice letter, which may have text after it: `\\textbf{(B)} 12`."""
    return TEXT.sub(r"\1", text).strip("{}$* ").removesuffix(".")


def _readings(text: str) -> list[str]:
    """`1,200` may be a list of two numbers or one number with a separator. Inside brackets it is two."""
    depth, parts, start = 0, [], 0
    for match in GROUPED.finditer(text):
        if match[0][-1] in "([{":
            depth += 1
        elif match[0][-1] in ")]}":
            depth -= 1
        elif depth == 0:
            parts += [text[start : match.start()], match[0].replace(",", "")]
            start = match.end()
    return [text, "".join([*parts, text[start:]])] if parts else [text]


# -- Structure ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parts:
    """`kind` is list, set, union, matrix, the two brackets of a tuple or interval, or one (a single expression)."""

    kind: str
    items: tuple[str, ...]
    rows: tuple[int, ...] = ()  # the lengths of a matrix's rows

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of `x=1,y=2`; empty unless each item has a distinct one."""
        matches = [LABEL.match(item) for item in self.items]
        names = tuple(match[1] for match in matches if match is not None)
        return names if len(names) == len(set(names)) == len(self.items) > 1 else ()


@functools.lru_cache(maxsize=1024)
def parts_of(text: str) -> Parts:
    """Take an answer apart. `x=2,-3` is two values of x, and so is `\\pm`."""
    label = LABEL.match(text)
    body = text[label.end() :] if label is not None and "=" not in text[label.end() :] else text
    kind = "list"
    if body.startswith("\\{") and body.endswith("\\}") and _encloses(body):
        body, kind = body[2:-2], "set"
    body = SEPARATORS.sub(",", _without_brackets(body))
    items = tuple(item for item in split(body, ",") if item)
    if len(items) > 1:
        return Parts(kind, items)
    if len(items) == 1 and items[0].count("\\pm") == 1:
        return Parts(kind, tuple(items[0].replace("\\pm", sign).removeprefix("+") for sign in "+-"))
    if len(pieces := split(body, "\\cup")) > 1:
        return Parts("union", tuple(pieces))
    if (matrix := re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", body)) is not None:
        # Rows end in `\\`; some data lost one of the two backslashes before a number.
        rows = [row.split("&") for row in re.split(r"\\\\|\\(?=[-\d.])", matrix[1]) if row]
        return Parts("matrix", tuple(cell for row in rows for cell in row), tuple(len(row) for row in rows))
    if (inside := _bracketed(body)) is not None:
        return Parts(body[0] + body[-1], inside)
    return Parts("one", (items[0] if kind == "set" and items else text,))


def split(text: str, mark: str) -> list[str]:
    """Split at `mark`, outside brackets and environments."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(f"{re.escape(mark)}|{BRACKET}", text):
        if match[0] != mark:
            depth += _step(match[0])
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


def _step(bracket: str) -> int:
    return 1 if bracket.startswith("\\begin") or bracket[-1] in "([{" else -1


def _encloses(text: str) -> bool:
    """Whether the first bracket is closed by the last one."""
    depth = 0
    for bracket in re.finditer(BRACKET, text):
        depth += _step(bracket[0])
        if depth <= 0:
            return depth == 0 and bracket.end() == len(text)
    return False


def _bracketed(text: str) -> tuple[str, ...] | None:
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]" or not _encloses(text):
        return None
    items = split(text[1:-1], ",")
    return tuple(items) if len(items) > 1 else None


def _without_brackets(text: str) -> str:
    """Strip redundant brackets: those of `((a,b))`, or around a union."""
    for _ in range(3):
        if text.startswith("(") and _encloses(text):
            inside = text[1:-1]
            text = inside if _encloses(inside) or len(split(inside, "\\cup")) > 1 else text
    return text


def _value_side(text: str) -> str:
    return LABEL.sub("", text, count=1) if LABEL.match(text) else text


def _chain(gold: str, reply: str) -> list[str]:
    """The sides of `2+3=5`, or of `x=2+3=5` unless the gold answer is an equation in something else."""
    own, label = LABEL.match(gold), LABEL.match(reply)
    if "=" in _value_side(gold) or (own is not None and (label is None or own[1] != label[1])):
        return []
    sides = split(_value_side(reply), "=")
    return sides if len(sides) > 1 else []


def _is_region(text: str, parts: Parts) -> bool:
    """Whether a text may be a set of numbers: an interval, a union, an inequality, the real numbers."""
    if parts.kind == "one":
        return "\\mathbb" in text or (bool(_relations(text)) and not re.search(r"[(\[][^()\[\]]*,", text))
    return parts.kind == "union" or (len(parts.items) == 2 and parts.kind in ("()", "[]", "(]", "[)"))


@dataclass
class Comparison:
    """A three-valued comparison: None if it depends on pairs without a verdict, which are collected in `open`."""

    verdicts: Mapping[Pair, bool]
    left: int  # comparisons that may still be made; beyond them, parts count as unequal
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
        gold_parts, reply_parts = parts_of(gold), parts_of(reply)
        kinds = {gold_parts.kind, reply_parts.kind}
        if reply_parts.kind == "one" and (sides := _chain(gold, reply)):
            return self._same_chain(_value_side(gold), sides)
        if kinds == {"one"}:
            return self._same_expression(gold_parts.items[0], reply_parts.items[0])
        if kinds <= {"list", "set"}:
            return self._same_list(gold_parts, reply_parts)
        if kinds == {"union"}:
            return self._matched(gold_parts.items, reply_parts.items) or self._query(gold, reply)
        if len(kinds) == 1:
            return self._in_order(gold_parts, reply_parts) if gold_parts.rows == reply_parts.rows else False
        if kinds == {"list", "()"}:
            # A pair without its brackets, or a list in brackets. Only a pair in the gold answer is ordered.
            if gold_parts.kind == "()" or gold_parts.labels:
                return self._in_order(gold_parts, reply_parts)
            return self._matched(gold_parts.items, reply_parts.items)
        if kinds & {"one", "union"} and _is_region(gold, gold_parts) and _is_region(reply, reply_parts):
            return self._query(gold, reply)
        return False

    def _query(self, gold: str, reply: str) -> bool | None:
        """The verdict about a pair, if it is known. Pairs that differ in what math-verify ignores are unequal."""
        gold_quantity, reply_quantity = quantity(gold), quantity(reply)
        if gold_quantity.scale != reply_quantity.scale or _ignored(gold_quantity.body) != _ignored(reply_quantity.body):
            return False
        if (gold, reply) in self.verdicts:
            return self.verdicts[gold, reply]
        self.open[gold, reply] = None
        return None

    # -- Several items

    def _same_list(self, gold: Parts, reply: Parts) -> bool | None:
        if gold.labels and reply.labels:
            if set(gold.labels) != set(reply.labels):
                return False
            items = dict(zip(reply.labels, reply.items, strict=True))
            reply = Parts(reply.kind, tuple(items[label] for label in gold.labels))
        if gold.labels or reply.labels:
            return self._in_order(gold, reply)
        return self._matched(gold.items, reply.items)

    def _in_order(self, gold: Parts, reply: Parts) -> bool | None:
        if len(gold.items) != len(reply.items):
            return False
        undecided = False
        for one, other in zip(gold.items, reply.items, strict=True):
            same = self.same(_value_side(one) if gold.labels else one, _value_side(other) if reply.labels else other)
            if same is False:
                return False
            undecided |= same is None
        return None if undecided else True

    def _matched(self, gold: Sequence[str], reply: Sequence[str]) -> bool | None:
        """Equal in any order, with equal counts. Equal spellings and equal numbers are paired first, without comparing
        every item with every other."""
        if len(gold) != len(reply):
            return False
        unpaired, candidates = _unpaired(gold, reply)
        undecided = False
        for item in unpaired:
            verdict: bool | None = False
            for index, other in enumerate(candidates):
                same = self.same(item, other)
                if same:
                    del candidates[index]
                    verdict = True
                    break
                verdict = None if same is None else verdict
            if verdict is False:
                return False
            undecided |= verdict is None
        return None if undecided else True

    # -- One expression

    def _same_expression(self, gold: str, reply: str) -> bool | None:
        gold_label, reply_label = LABEL.match(gold), LABEL.match(reply)
        if _relations(gold) != _relations(reply):
            return False
        if gold_label is not None and reply_label is not None and gold_label[1] != reply_label[1]:
            return self._query(gold, reply)
        gold_side, reply_side = _value_side(gold), _value_side(reply)
        if (verdict := same_numeral(gold_side, reply_side)) is not None:
            return verdict
        gold_quantity, reply_quantity = quantity(gold_side), quantity(reply_side)
        units = {gold_quantity.unit, reply_quantity.unit}
        if len(units) == 2 and None not in units:
            return False
        if (verdict := _same_quantity(gold_quantity, reply_quantity)) is not None:
            return verdict
        # `x=5` is not matched by `2x=5`, whose right side is the same.
        whole = gold_label is not None and "=" in reply_side
        return self._query(gold, reply) if whole else self._query(gold_side, reply_side)

    def _same_chain(self, gold: str, sides: Sequence[str]) -> bool | None:
        """`2+3=5` has the value 5; `6=5` and `x>2=5` have none."""
        sizes = [size for side in sides if (size := _approximate(side)) is not None]
        apart = sizes and max(sizes) - min(sizes) > ROUNDED * max(Fraction(1), *map(abs, sizes))
        if apart or any(_relations(side) for side in sides[:-1]):
            return False
        return self.same(gold, sides[-1])


# -- Numbers and algebra -----------------------------------------------------------------------------------------------


def _unpaired(gold: Sequence[str], reply: Sequence[str]) -> tuple[list[str], list[str]]:
    """The remaining items of both once equal spellings and equal numbers are paired."""
    gold_keys, reply_keys = list(map(_key, gold)), list(map(_key, reply))
    common = Counter(gold_keys) & Counter(reply_keys)
    return _without(gold, gold_keys, common), _without(reply, reply_keys, common)


def _without(items: Sequence[str], keys: Sequence[Fraction | str], common: Counter[Fraction | str]) -> list[str]:
    paired, remaining = Counter[Fraction | str](), []
    for item, key in zip(items, keys, strict=True):
        if paired[key] < common[key]:
            paired[key] += 1
        else:
            remaining.append(item)
    return remaining


def _key(text: str) -> Fraction | str:
    """The value of a rational number; the text of anything else."""
    parsed = quantity(text)
    ratio = value(parsed.body) if parsed.unit is None and not parsed.percent else None
    size = ratio.rational() if ratio is not None else None
    return text if size is None else size * parsed.scale


def _approximate(text: str) -> Fraction | None:
    """The approximate value of a text that is a number."""
    parsed = quantity(text)
    ratio = value(parsed.body)
    size = None if ratio is None else ratio.rational() or ratio.approximate()
    return None if size is None or parsed.percent else Fraction(size) * parsed.scale


def _relations(text: str) -> set[str]:
    return {kind for kind, pattern in RELATIONS.items() if pattern.search(text)}


def _ignored(text: str) -> set[str]:
    """What math-verify ignores but equal expressions share: primes, dots, text, and words that change a number."""
    inside = re.findall(r"[a-z]{2,}", " ".join(TEXT.findall(text)).lower())  # (P) is a letter, with or without \text
    plain = re.findall(r"[a-z]+", re.sub(r"\\[A-Za-z]+", " ", text.lower()))
    return {*IGNORED.findall(text), *inside, *(CHANGING & set(plain))}


def _same_quantity(gold: Quantity, reply: Quantity) -> bool | None:
    gold_value, reply_value = value(gold.body), value(reply.body)
    if gold_value is None or reply_value is None:
        same = (reply.body, reply.percent, reply.scale) == (gold.body, gold.percent, gold.scale)
        return (same and bool(reply.body)) or None
    try:
        one, other = gold_value * number(gold.scale), reply_value * number(reply.scale)
        if one == other:
            return True
        if gold.percent == reply.percent:
            return _clearly_different(one, other)
        hundredth = number(Fraction(1, 100))
        return (other * hundredth == one if reply.percent else one * hundredth == other) or None
    except NotAlgebra:  # too large together
        return None


def _clearly_different(a: Ratio, b: Ratio) -> bool | None:
    """False for two numbers that differ too much to be roundings of each other."""
    exact_a, exact_b = a.rational(), b.rational()
    if exact_a is not None and exact_b is not None:
        return False if abs(exact_a - exact_b) > CLOSE * max(Fraction(1), abs(exact_a)) else None
    near_a, near_b = a.approximate(), b.approximate()
    if near_a is None or near_b is None:
        return None
    return False if abs(near_a - near_b) > float(CLOSE) * max(1.0, abs(near_a)) else None


@functools.lru_cache(maxsize=1024)
def value(body: str) -> Ratio | None:
    """The exact value, if the text is algebra. Three letters in a row are a word."""
    if THOUSANDS.fullmatch(body):
        body = body.replace(",", "")
    elif "\\frac" in body:
        body = IN_FRACTION.sub(lambda match: match[0].replace(",", ""), body)
    if WORD.search(body):
        return None
    try:
        return parse(body)
    except NotAlgebra:
        return None
