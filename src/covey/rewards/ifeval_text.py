"""Counting words and sentences as IFEval does, without a language toolkit.

Words are runs of letters, digits and underscores, as there. Sentences end in `.`, `!`, `?` or `…` (with closing quotes
and brackets) before a space. After an abbreviation or an initial they end only before a word that often starts one,
after the number of a list item or a row of dots only before no small letter. The public definition asks a trained model
(Punkt), whose lists of abbreviations and of starting words are longer. Tokens, for counting words in capitals, are
parted at spaces, punctuation and contractions, as Treebank does it.
"""

from __future__ import annotations

import re

WORD = re.compile(r"\w+")
# A row of marks is taken whole and never given back, so that a long one before a letter is looked at once.
END = re.compile(r"""(?:(?<![.!?])(?:\.*+[!?][.!?]*+|\.++)|…)["'”’)\]*_]*+(?=\s|$)""")
FOLLOWING = re.compile(r"""[\s"'“‘(*_[]*([\w]+|\S)""")
ABBREVIATIONS = frozenset(
    [
        *("mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "inc", "ltd", "co", "corp", "gen", "col", "capt"),
        *("lt", "sgt", "rev", "hon", "gov", "sen", "rep", "pres", "e.g", "i.e", "cf", "al", "approx", "fig", "dept"),
        *("est", "jan", "feb", "mar", "apr", "aug", "sept", "oct", "nov", "dec", "ave", "blvd", "mt", "maj", "u.s"),
        *("u.k", "a.m", "p.m", "d.c", "ph.d", "pp", "op", "adm", "messrs", "bros", "univ", "assn", "comdr"),
    ]
)
LONGEST_WORD = 100  # how far back the word before a full stop is looked for
STARTERS = frozenset(
    [
        *("the", "this", "that", "these", "those", "it", "he", "she", "they", "we", "you", "i", "there", "here", "in"),
        *("on", "at", "after", "before", "but", "and", "if", "when", "while", "however", "what", "who", "why", "how"),
        *("a", "an", "as", "for", "from", "its", "his", "her", "their", "our", "my", "your", "please", "then", "so"),
    ]
)
TOKEN = re.compile(r"(?:[A-Za-z]\.){2,}(?!\w)|[^\W_](?:[\w./'’-]*\w)?|[^\s\w]+|_+")  # U.S., well-known, 3.5
CONTRACTION = re.compile(r"(?<=\w)(?=n['’]t$)|(?<=\w)(?=['’](?:s|m|d|ll|re|ve)$)|(?<=^can)(?=not$)", re.IGNORECASE)


def count_words(text: str) -> int:
    return len(WORD.findall(text))


def count_sentences(text: str) -> int:
    """How many sentences; what stands behind the last end is one too."""
    count, start, searched, worded = 0, 0, 0, False
    for found in END.finditer(text):
        # What was searched is not searched again: rows of full stops without a word between them may be long.
        worded = worded or WORD.search(text, searched, found.end()) is not None
        searched = found.end()
        if worded and _ends(text, start, found):
            count, start, worded = count + 1, found.end(), False
    return count + bool(text[start:].strip())


def _ends(text: str, start: int, found: re.Match[str]) -> bool:
    following = FOLLOWING.match(text, found.end())
    if "!" in found[0] or "?" in found[0] or following is None:
        return True
    if found[0].startswith(("..", "…")):
        return not following[1][0].islower()
    before = text[max(start, found.start() - LONGEST_WORD) : found.start()].split()
    last = before[-1].lstrip("\"'“(*[").lower() if before else ""
    if last.isdigit():
        return not following[1][0].islower()
    if last in ABBREVIATIONS or (len(last) == 1 and last.isalpha() and last != "i"):
        return not following[1][0].islower() and following[1].lower() in STARTERS
    return True


def capital_words(text: str) -> int:
    """Tokens without a small letter and with a capital one. DON'T is two, as Treebank has it."""
    return sum(part.isupper() for token in TOKEN.findall(text) for part in CONTRACTION.split(token))
