"""Counting words and sentences as IFEval does, without a language toolkit.

Words are runs of letters, digits and underscores, as there. Sentences end in `.`, `!` or `?` with closing quotes and
brackets, before a space; not after an abbreviation, an initial or the number of a list item, and, after a full stop,
not before a small letter. The public definition asks a trained model (Punkt), which differs on rare abbreviations.
Tokens, for counting words in capitals, are parted at spaces, punctuation and contractions, as Treebank does it.
"""

from __future__ import annotations

import re

WORD = re.compile(r"\w+")
END = re.compile(r"""(?:(?<![.])\.(?![.])|\.{2,}|[!?]+[.!?]*|…)["'”’)\]*_]*(?=\s|$)""")
ABBREVIATIONS = frozenset(
    [
        *("mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "inc", "ltd", "co", "corp", "gen", "col", "capt"),
        *("lt", "sgt", "rev", "hon", "gov", "sen", "rep", "pres", "e.g", "i.e", "cf", "al", "approx", "fig", "dept"),
        *("est", "jan", "feb", "mar", "apr", "aug", "sept", "oct", "nov", "dec", "ave", "blvd", "mt", "maj", "u.s"),
        *("u.k", "a.m", "p.m", "d.c", "ph.d", "pp", "op", "adm", "messrs", "bros", "univ", "assn", "comdr"),
    ]
)
TOKEN = re.compile(
    r"""(?:[A-Za-z]\.){2,}            # U.S.
        | [A-Za-z]+(?=n['’]t\b)       # DO in DON'T
        | n['’]t\b
        | ['’](?:s|m|d|ll|re|ve)\b
        | [^\W_](?:[\w.&/'’-]*\w)?    # well-known, 3.5, AT&T
        | [^\s\w]+ | _+""",
    re.VERBOSE | re.IGNORECASE,
)


def count_words(text: str) -> int:
    return len(WORD.findall(text))


def count_sentences(text: str) -> int:
    """How many sentences; what stands behind the last end is one too."""
    count, start = 0, 0
    for found in END.finditer(text):
        if WORD.search(text, start, found.end()) and _ends(text, start, found):
            count += 1
            start = found.end()
    return count + bool(text[start:].strip())


def _ends(text: str, start: int, found: re.Match[str]) -> bool:
    if found[0][0] not in ".…":
        return True
    following = text[found.end() :].lstrip()[:1]
    if not following:
        return True
    if following.islower():
        return False
    before = text[start : found.start()].split()
    last = before[-1].lstrip("\"'“(*[").lower() if before else ""
    initial = len(last) == 1 and last.isalpha() and last != "i"
    item = last.isdigit() and _starts_line(text, found.start() - len(last))
    return not (last in ABBREVIATIONS or initial or item)


def _starts_line(text: str, place: int) -> bool:
    return not text[text.rfind("\n", 0, place) + 1 : place].strip()


def capital_words(text: str) -> int:
    """Tokens without a small letter and with a capital one."""
    return sum(token.isupper() for token in TOKEN.findall(text))
