"""When two questions are the same: their text without what does not change a question.

Case, white space, dollar signs, LaTeX's spacing and sizes, and punctuation do not count, but for a mark between two
digits: 1.5 is not 15. Signs and brackets do: x+1 is not x-1.
"""

from __future__ import annotations

import re
import unicodedata

SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[,;:! ])(?![a-z])|[\s$~]+")
FRACTIONS = re.compile(r"\\[dt]frac")
MARKS = re.compile(r"(?<!\d)[.,:]|[.,:](?!\d)|[;!?'\"`´‘’“”*_]")


def normal(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).casefold()
    return MARKS.sub("", SPACING.sub("", FRACTIONS.sub(r"\\frac", text)))
