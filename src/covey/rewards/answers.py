"""Where in a reply the final answer stands."""

from __future__ import annotations

import re

# Both see a text in which every run of blanks is one space: so none of their parts can share a run out in many ways.
LABELLED = re.compile(r"(?:final )?answer ?(?:\*\*)? ?[:：] ?(?:\*\*)?", re.IGNORECASE)
STATED = re.compile(
    r"answer(?: (?:to|for|of) [^.\n]{1,80}?)? ?(?:\*\*)?"
    r"(?: ?[:：=] ?| (?:is|are|was|would be|will be|equals)(?: ?[:：])? )(?:\*\*)?",
    re.IGNORECASE,
)
BLANKS = re.compile(r"[ \t]+")
END = 8000  # characters, blanks counted once, in which a label is looked for
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox)[ \t]*(?:\{|[ \t](?=[^ \t{]))")


def tagged(text: str) -> str | None:
    """The text inside the last <answer>…</answer>."""
    lower = text.lower()
    end = lower.rfind("</answer>")
    start = lower.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end].strip() if 0 <= start < end else None


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
    closing = _closing_braces(text)
    for start in reversed(list(BOX.finditer(text))):
        if not start[0].endswith("{"):
            return re.split(r"[\s$]", text[start.end() :], maxsplit=1)[0]
        if start.end() - 1 in closing:
            return text[start.end() : closing[start.end() - 1]].strip()
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """Where each brace that is closed is closed. `\\{` and `\\}` are signs, not braces."""
    pairs, opened = {}, []
    for found in BRACE.finditer(text):
        if found[0] == "{":
            opened.append(found.start())
        elif found[0] == "}" and opened:
            pairs[opened.pop()] = found.start()
    return pairs


def _line_after(mark: re.Pattern[str], text: str) -> str | None:
    text = BLANKS.sub(" ", text)[-END:]
    found = list(mark.finditer(text))
    rest = text[found[-1].end() :].strip() if found else ""
    return rest.splitlines()[0].strip("* \t") if rest else None
