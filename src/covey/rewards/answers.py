"""Extract the final answer from a reply: <answer> tags, labels, `####` and \\boxed{…}."""

from __future__ import annotations

import re

# Both are matched against text whose runs of blanks are single spaces, which rules out catastrophic backtracking.
LABELLED = re.compile(r"(?:final )?answer ?(?:\*\*)? ?[:：] ?(?:\*\*)?", re.IGNORECASE)
STATED = re.compile(
    r"answer(?: (?:to|for|of) [^.\n]{1,80}?)? ?(?:\*\*)?"
    r"(?: ?[:：=] ?| (?:is|are|was|would be|will be|equals)(?: ?[:：])? )(?:\*\*)?",
    re.IGNORECASE,
)
BLANKS = re.compile(r"[ \t]+")
MAX_SEARCHED = 8000  # characters at the end of a reply that are searched for a label
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox)[ \t]*(?:\{|[ \t](?=[^ \t{]))")


def tagged(text: str) -> str | None:
    """The text inside the last <answer>…</answer>."""
    lower = text.lower()
    end = lower.rfind("</answer>")
    start = lower.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end].strip() if 0 <= start < end else None


def labelled(text: str) -> str | None:
    """The line after the last `Answer:` or `Final Answer:`, or the next non-empty line."""
    return _line_after(LABELLED, text)


def stated(text: str) -> str | None:
    """The line after the last `answer is`, `Answer:` or `the answer to … is`."""
    return _line_after(STATED, text)


def hashed(text: str) -> str | None:
    """The line after the last `####`, GSM8K's mark."""
    _, mark, rest = text.rpartition("####")
    lines = rest.strip().splitlines()
    return lines[0].strip() if mark and lines else None


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{…}, with balanced braces. An unclosed box does not count: the reply was cut off.
    TeX also allows `\\boxed 5`."""
    closing = _closing_braces(text)
    for start in reversed(list(BOX.finditer(text))):
        if not start[0].endswith("{"):
            return re.split(r"[\s$]", text[start.end() :], maxsplit=1)[0]
        if start.end() - 1 in closing:
            return text[start.end() : closing[start.end() - 1]].strip()
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """The position of each opening brace → that of its closing brace. `\\{` and `\\}` are symbols, not braces."""
    pairs, opened = {}, []
    for brace in BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            pairs[opened.pop()] = brace.start()
    return pairs


def _line_after(mark: re.Pattern[str], text: str) -> str | None:
    text = BLANKS.sub(" ", text)[-MAX_SEARCHED:]
    marks = list(mark.finditer(text))
    rest = text[marks[-1].end() :].strip() if marks else ""
    return rest.splitlines()[0].strip("* \t") if rest else None
