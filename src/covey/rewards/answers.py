"""Where in a reply the final answer stands."""

from __future__ import annotations

import re

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
LABELLED = re.compile(r"(?:final[ \t]+)?answer[ \t]*(?:\*\*)?[ \t]*[:：][ \t]*(?:\*\*)?", re.IGNORECASE)
STATED = re.compile(
    r"answer(?:[ \t]+(?:to|for|of)[ \t][^.\n]{1,80}?)?[ \t]*(?:\*\*)?"
    r"(?:[ \t]*[:：=][ \t]*|[ \t]+(?:is|are|was|would[ \t]+be|will[ \t]+be|equals)(?:[ \t]*[:：])?[ \t]+)(?:\*\*)?",
    re.IGNORECASE,
)
BOX = re.compile(r"\\(?:boxed|fbox)[ \t]*(?:\{|[ \t](?=[^ \t{]))")


def tagged(text: str) -> str | None:
    """The text inside the last <answer>…</answer>."""
    found = TAGGED.findall(text)
    return found[-1].strip() if found else None


def labelled(text: str) -> str | None:
    """The line after the last `Answer:` or `Final Answer:`, or the next line that is not empty."""
    return _line_after(LABELLED, text)


def stated(text: str) -> str | None:
    """The line after the last `answer is`, `Answer:` or `the answer to … is`."""
    return _line_after(STATED, text)


def hashed(text: str) -> str | None:
    """What follows the last `####`, as GSM8K marks its answers."""
    _, found, rest = text.rpartition("####")
    lines = rest.strip().splitlines()
    return lines[0].strip() if found and lines else None


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{…}, whatever braces it holds. One that is never closed is none: its reply was
    cut off. TeX also allows `\\boxed 5`."""
    for start in reversed(list(BOX.finditer(text))):
        if not start[0].endswith("{"):
            return re.split(r"[\s$]", text[start.end() :], maxsplit=1)[0]
        end = closing_brace(text, start.end())
        if end is not None:
            return text[start.end() : end].strip()
    return None


def closing_brace(text: str, start: int) -> int | None:
    """The place of the brace that closes the one before `start`. `\\{` and `\\}` are signs, not braces."""
    depth = 1
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return None


def _line_after(mark: re.Pattern[str], text: str) -> str | None:
    found = list(mark.finditer(text))
    rest = text[found[-1].end() :].strip() if found else ""
    return rest.splitlines()[0].strip("* \t") if rest else None
