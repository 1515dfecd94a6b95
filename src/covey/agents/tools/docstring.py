"""What a docstring says of a function and of its parameters.

Three ways of writing are read:

    Args:                          :param query: What to look for.        Search.  Args: query: what  top_k: how many
        query: What to look for.
        top_k (int): How many.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from itertools import zip_longest

ARGS = re.compile(r"(?:^|(?<=\s))(?:Args|Arguments|Parameters)[ \t]*:[ \t]*", re.MULTILINE)
FIELD = re.compile(r"^[ \t]*:(\w+)[ \t]*([^:\n]*):", re.MULTILINE)
SECTION = re.compile(
    r"(?:^|(?<=\s))(?:Returns?|Raises|Yields?)[ \t]*:(?!\S)|^[ \t]*(?:Examples?|Notes?)[ \t]*:[ \t]*$", re.MULTILINE
)


def read_docstring(text: str | None, parameters: Iterable[str]) -> tuple[str, dict[str, str]]:
    """The first paragraph, and a description for each parameter that has one."""
    text = inspect.cleandoc(text or "")
    found: dict[str, str] = {}
    starts = [len(text)]
    if args := ARGS.search(text):
        starts.append(args.start())
        found |= _sections(text, args, list(parameters))
    if fields := list(FIELD.finditer(text)):
        starts.append(fields[0].start())
        found |= _fields(text, fields, list(parameters))
    if end := SECTION.search(text):
        starts.append(end.start())
    paragraph = re.split(r"\n[ \t]*\n", text[: min(starts)].strip())[0]
    return _one_line(paragraph), found


def _sections(text: str, args: re.Match[str], parameters: list[str]) -> dict[str, str]:
    """`name: text` and `name (type): text`. On the line of `Args:` itself names may follow each other on one line."""
    if not parameters:
        return {}
    body = text[args.end() :]
    if end := SECTION.search(body):
        body = body[: end.start()]
    on_one_line = bool(body.split("\n", 1)[0].strip())
    if not on_one_line and "\n" in text[: args.start()]:  # cleandoc moves all lines after the first to the margin
        body = _indented(body)
    before = r"(?:^|(?<=[\s;,]))" if on_one_line else r"^[ \t]*"
    names = "|".join(re.escape(name) for name in parameters)
    entry = re.compile(rf"{before}({names})[ \t]*(?:\([^)\n]*\))?[ \t]*:(?!:)", re.MULTILINE)
    return _between(body, list(entry.finditer(body)))


def _indented(body: str) -> str:
    """The lines of a section: it ends where a line begins at the margin."""
    lines = body.split("\n")[1:]
    end = next((n for n, line in enumerate(lines) if line.strip() and not line[0].isspace()), len(lines))
    return "\n".join(lines[:end])


def _fields(text: str, fields: list[re.Match[str]], parameters: list[str]) -> dict[str, str]:
    """`:param name:` and `:param type name:`; a field ends where the next begins, or at an empty line."""
    found = {}
    for field, following in zip_longest(fields, fields[1:]):
        words = field[2].split()
        if field[1] in ("param", "parameter", "arg", "argument") and words and words[-1] in parameters:
            body = text[field.end() : following.start() if following else len(text)]
            found[words[-1]] = _one_line(re.split(r"\n[ \t]*\n", body)[0])
    return found


def _between(body: str, entries: list[re.Match[str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry, following in zip_longest(entries, entries[1:]):
        text = body[entry.end() : following.start() if following else len(body)]
        found.setdefault(entry[1], _one_line(text).rstrip(";,"))
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())
