"""Normalize answers written in LaTeX, Unicode or plain text, and parse their units and number bases.

`tidy` gives an answer one spelling, `quantity` splits off its unit, currency or percent sign:

    \\dfrac 59 → \\frac59        10{,}080 → 10080        $x = 5$. → x=5        864 \\mbox{ inches}^2 → 864, unit inch^2

`numeral` reads numbers in another base: `52_8`, `(1101)_{2}`, `\\text{A5}_{11}`, `52 base 8`, `52_{\\text{eight}}`. The
base is part of the answer. Gold `52_8` requires these digits in this base: 52, 52_9 and 42 are other answers, and
`24_{10}` is 24. A gold answer without a base allows any base that has its digits (MATH has `110111` for "express your
answer in base 2").
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

# -- Number bases ------------------------------------------------------------------------------------------------------

BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
BASES |= {"eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16}
DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"

# For tidy text, which has no spaces outside \text{…}.
_MARK = r"(?:_|(?:\\text\{)?\(?in\s*base|(?:\\text\{)?\(?base)"
_BASE = r"(\d{1,2}|" + "|".join(BASES) + r")(?:_?\{?10\}?)?"
BASED = re.compile(
    rf"([-+]?)[({{]*(?:\\text\{{)?([0-9A-Z]+(?:\.[0-9A-Z]+)?)[)}}]*{_MARK}[{{}}\s]*(?:\\text\{{)?\s*{_BASE}[)}}\s]*"
)
INSIDE = re.compile(r"(?<![A-Za-z_\d])[({]*(?:\\text\{)?\d[0-9A-Z.]*[)}]*_")


@dataclass(frozen=True, slots=True)
class Numeral:
    """Digits and their base."""

    digits: str  # with a sign, without leading zeros
    base: int


def numeral(text: str) -> Numeral | None:
    """Parse a tidy text that is a number with a base. None for anything else, or a digit that the base lacks."""
    match = BASED.fullmatch(text)
    if match is None:
        return None
    sign, digits, name = match.groups()
    base = BASES[name] if name in BASES else int(name)
    if not 2 <= base <= len(DIGITS) or not set(digits) - {"."} <= set(DIGITS[:base]):
        return None
    return Numeral(sign.replace("+", "") + (digits.lstrip("0") or "0"), base)


def same_numeral(gold: str, reply: str) -> bool | None:
    """Whether two tidy texts are the same number in the same base. None: neither has a base."""
    theirs, ours = numeral(gold), numeral(reply)
    if theirs is None and ours is None:
        # math-verify would ignore bases in a sum, or with digits that the base lacks.
        return False if INSIDE.search(gold) or INSIDE.search(reply) else None
    if theirs is not None and ours is not None:
        return theirs == ours
    if theirs is None:
        return ours is not None and ours == numeral(f"{gold}_{{{ours.base}}}")
    return theirs.base == 10 and theirs == numeral(f"{reply}_{{10}}")


# -- Normalization -----------------------------------------------------------------------------------------------------

UNICODE = str.maketrans(
    {
        **{"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "∕": "/", "π": r"\pi ", "∞": r"\infty "},
        **{"θ": r"\theta ", "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "±": r"\pm ", "\u00a0": " "},
        **{"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}"},
        **{"²": "^2", "³": "^3", "∈": r"\in ", "，": ",", "（": "(", "）": ")", "≠": r"\ne ", "≈": "=", "′": "'"},
        "’": "'",
    }
)
WRAPPED = re.compile(r"^(?:\$\$(.+)\$\$|\$(.+)\$|\\\((.+)\\\)|\\\[(.+)\\\]|\*\*(.+)\*\*|`(.+)`)$", re.DOTALL)
INNER = re.compile(r"(?<!\\)\$")
# Commands that only change the formatting. The end of a matrix row (two backslashes) is matched first, and kept.
LOOKS = re.compile(
    r"(\\\\)|\\(?:left|right|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr|displaystyle|textstyle|limits|mathstrut|quad|qquad)"
    r"(?![A-Za-z])|\\[!,;:>]|~|\\(?=\s)|\\hspace\{[^{}]*\}|\\phantom\{[^{}]*\}"
)
TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|texttt|mbox|hbox|mathrm|mathbf|mathit|mathsf|operatorname|emph)\*?\s*\{([^{}]*)\}"
)
NAMES = {"dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "times": "*", "cdot": "*", "ast": "*", "leq": "le"}
NAMES |= {"geq": "ge", "div": "/", "lbrace": "\\{", "rbrace": "\\}", "lbrack": "[", "rbrack": "]", "degree": "^\\circ"}
NAMES |= {"neq": "ne", "leqslant": "le", "geqslant": "ge", "lt": "<", "gt": ">", "prime": "'", "approx": "="}
NAMES |= {"bmatrix": "pmatrix", "Bmatrix": "pmatrix", "infinity": "\\infty", "lvert": "|", "rvert": "|", "colon": ":"}
RENAMED = re.compile(r"\\(" + "|".join(NAMES) + r")(?![A-Za-z])")
DEGREES = re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})")
SHORT_UNITS = "cm mm km kg mg ml mL ft in yd mi lb oz hr dm"
# Words after a number: three letters or more, or a known unit. 5xy is a product.
TRAILING = re.compile(
    r"(?<=[\d})%])\s*(?<!\\)((?:" + SHORT_UNITS.replace(" ", "|") + r"|[A-Za-z]{3,})\.?(?:\s+[A-Za-z]+){0,3})"
    r"(?:\s*\^\s*\{?([23])\}?)?$"
)
NOT_UNITS = {"and", "or", "mod", "times", "plus", "minus", "over", "sqrt", "pi", "log", "sin", "cos", "tan", "choose"}
SCALES: dict[str, int | Fraction] = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
SCALES |= {"trillion": 10**12, "dozen": 12}
SCALES |= {f"{name}s": size for name, size in SCALES.items()}
PARTS = {"half": 2, "halves": 2, "thirds": 3, "fourths": 4, "fifths": 5, "sixths": 6, "sevenths": 7, "eighths": 8}
PARTS |= {"ninths": 9, "tenths": 10, "hundredths": 100, "thousandths": 1000}  # not quarters, which are also coins
SCALES |= {name: Fraction(1, size) for name, size in PARTS.items()}
POWERS = {"squared": "2", "cubed": "3"}
NUMERALS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
NUMERALS += "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
# Words that change the number before them, so they are not a unit: 5 hundred twenty.
CHANGING = frozenset([*NUMERALS.split(), *SCALES, "factorial", "divided", "multiplied", "modulo", "to"])
UNEQUAL = re.compile(r"\\not\s*=|(?:(?<=[\sA-Za-z])|^)!=")  # 5!=120 is a factorial
POWER_WORD = re.compile(r"(?<=[^\s%])\s*\\text\{(squared|cubed)\}")
SHORT_FRACTION = re.compile(r"\\frac(\d)(\d|(?=\{))")
UNIT = re.compile(r"\\text\{([^{}]*)\}(?:\^\{?([23])\}?)?$")
CURRENCY = re.compile(r"^([-+]?)\s*(?:\\?\$|[€£¥])\s*(?=[-\d.\\(])|\s*(?:\\\$|[€£¥])$")


UNIT_SPELLINGS = (  # the canonical name first
    "mm millimeter millimeters millimetre millimetres",
    "cm centimeter centimeters centimetre centimetres",
    "m meter meters metre metres",
    "km kilometer kilometers kilometre kilometres",
    "inch in inches",
    "foot ft feet",
    "yard yd yards",
    "mile mi miles",
    "second s sec secs seconds",
    "minute min mins minutes",
    "hour h hr hrs hours",
    "day days",
    "week weeks",
    "year years yr yrs",
    "g gram grams",
    "kg kilogram kilograms",
    "pound lb lbs pounds",
    "ounce oz ounces",
    "ml mL milliliter milliliters",
    "l L liter liters litre litres",
    "dollar dollars USD usd",
    "cent cents",
    "degree degrees",
    "radian radians rad",
)
UNITS = {word: row.split()[0] for row in UNIT_SPELLINGS for word in row.split()}


@dataclass(frozen=True, slots=True)
class Quantity:
    """An answer split into its body and what follows it."""

    body: str
    unit: str | None = None  # None: no unit, or one that is not in the table; both are ignored in a comparison
    percent: bool = False
    scale: Fraction = Fraction(1)  # of a word such as million


def tidy(text: str) -> str:
    """Remove formatting commands and spaces, except between digits (2 3 is not 23)."""
    text = _unwrapped(text.translate(UNICODE))
    text = re.sub(r"(?<=\d)(?:\{,\}|,\s*\\!|\\,|\\!|\\ )(?=\d{3}(?!\d))", "", text)  # 10{,}080  10,\!080  10\,080
    text = UNEQUAL.sub(r"\\ne ", text).replace("<=", "\\le ").replace(">=", "\\ge ")
    text = RENAMED.sub(lambda match: _renamed(NAMES[match[1]]), LOOKS.sub(lambda match: match[1] or " ", text))
    text = text.replace("\\begin{matrix}", "\\begin{pmatrix}").replace("\\end{matrix}", "\\end{pmatrix}")
    text = re.sub(r"\\(begin|end)\{[bBvV]matrix\}", r"\\\1{pmatrix}", text)
    text = re.sub(r"(?<![\w.\\}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\w.])", r"\1\\frac{\2}{\3}", text)  # 1 4/5
    text = TEXT.sub(lambda match: rf"\text{{{match[1].strip()}}}", text.strip())
    text = re.sub(r"(?<![A-Za-z])\{(and|or)\}", r"\\text{\1}", text)  # some data lost the \text before it
    text = TRAILING.sub(_as_text, text.rstrip(" .,;:"))
    text = POWER_WORD.sub(lambda match: f"^{POWERS[match[1]]}", text)
    return _without_spaces(text)


def _renamed(name: str) -> str:
    return "\\" + name if name.isalpha() else name


def _unwrapped(text: str) -> str:
    """Strip dollars, stars or backticks around the whole text; in `$2$ and $3$` also the dollars inside."""
    text = text.strip().removesuffix(".").strip()
    while (wrapped := WRAPPED.match(text)) is not None:
        text = next(part for part in wrapped.groups() if part is not None).strip().removesuffix(".").strip()
    return INNER.sub(" ", text) if len(INNER.findall(text)) >= 2 else text


def _as_text(match: re.Match[str]) -> str:
    if _joins(match[1].split()):
        return match[0]
    return rf"\text{{{match[1]}}}" + (f"^{match[2]}" if match[2] else "")


def _joins(words: list[str]) -> bool:
    """Whether the words after a number lead to another number: `5 and`, `5 or more`, `5 mod 7`."""
    return words[0].lower() in NOT_UNITS or any(word.lower() in ("and", "or") for word in words)


def _without_spaces(text: str) -> str:
    """Remove spaces, except inside \\text{…}, between digits, and between a command and a letter (\\cot x)."""
    parts = re.split(r"(\\text\{[^{}]*\})", text)
    for index in range(0, len(parts), 2):
        joined = re.sub(r"(?:,\s*|\s)(and|or)\s", r"\\text{\1}", parts[index])
        closed = re.sub(r"(?<=\d)\s+(?=[\d.])", "\0", joined)
        closed = re.sub(r"(\\[A-Za-z]+)\s+(?=[A-Za-z])", "\\1\0", closed)
        parts[index] = re.sub(r"\s+", "", closed).replace("\0", " ")
    closed = re.sub(r"([_^])\{(\w)\}", r"\1\2", "".join(parts))
    closed = SHORT_FRACTION.sub(lambda match: rf"\frac{{{match[1]}}}" + (match[2] and f"{{{match[2]}}}"), closed)
    return re.sub(r"\\(sin|cos|tan|cot|sec|csc|log|ln)(?:\{(\w)\}|\((\w)\))", r"\\\1 \2\3", closed).removeprefix("=")


@functools.lru_cache(maxsize=1024)
def quantity(text: str) -> Quantity:
    """Split a tidy text into its body and its unit, percent sign or scale."""
    unit, percent, scale = None, False, Fraction(1)
    if DEGREES.search(text):
        text, unit = DEGREES.sub("", text), "degree"
    if (match := UNIT.search(text)) is not None and match.start() > 0:
        words = match[1].replace(".", " ").split()
        while words and words[0].lower() in SCALES:
            scale *= SCALES[words.pop(0).lower()]
        if words and (_joins(words) or words[0].lower() in CHANGING or match[1] in POWERS):
            scale = Fraction(1)  # not a unit: the words stay in the body
        else:
            text = text[: match.start()]
            if words and words[0].lower() in ("percent", "percentage"):
                percent = True
            else:
                unit = _unit(words, match[2]) or unit
    stripped = CURRENCY.sub(r"\1", text)
    if stripped != text and "$" in text:
        unit = unit or "dollar"
    body = re.sub(r"\\?%$", "", stripped)
    return Quantity(body, unit, percent or body != stripped, scale)


def _unit(words: list[str], power: str | None) -> str | None:
    """The canonical name, or None for an unknown unit such as `miles per hour`. `square inches` is `inch^2`."""
    powers = {"square": "2", "sq": "2", "cubic": "3", "cu": "3", **POWERS}
    if words and words[0].lower() in powers:
        power = powers[words.pop(0).lower()]
    elif words and words[-1].lower() in POWERS:
        power = POWERS[words.pop().lower()]
    known = UNITS.get(words[0]) or UNITS.get(words[0].lower()) if len(words) == 1 else None
    return f"{known}^{power}" if known and power else known


def listed(text: str) -> str | None:
    """A list of names or letters in one spelling: `\\text{A, D}`, `{A,D}` and `A,D` are equal. None for a formula."""
    match = re.fullmatch(r"(?:\\text)?\{([^{}]*)\}", text)
    plain = re.sub(r"\s", "", match[1] if match else text)
    return plain if re.fullmatch(r"[A-Za-z][A-Za-z0-9'-]*(?:,[A-Za-z][A-Za-z0-9'-]*)*", plain) else None


def words_only(text: str) -> str | None:
    """The text of an answer that is not a formula (`\\text{even}`, `Navin`), casefolded. None for a formula."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    plain = " ".join(plain.replace("{", " ").replace("}", " ").split())
    return plain.casefold() if re.fullmatch(r"[A-Za-z][A-Za-z' -]{2,}", plain) else None
