"""Words of others in a Markdown page: titles, names of models, tasks and rewards, commands. They are shown as they are,
and never become HTML, links, pictures, headings or further cells of a table."""

from __future__ import annotations

import re

_SPECIAL = re.compile(r"[\\`*|]|\](?=[(\[:])|(?<!\w)[_~]|[_~](?!\w)")  # brackets alone, as of an interval, are no link
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def plain(value: object) -> str:
    """Text within a line."""
    words = " ".join(str(value).split())
    escaped = _SPECIAL.sub(lambda found: f"\\{found[0]}", words)
    return "".join(_ENTITIES.get(letter, letter) for letter in escaped)


def code(value: object) -> str:
    """A span of code. What would end a cell is escaped: tables are read before their spans."""
    words = " ".join(str(value).split()).replace("|", "\\|")
    ticks = _longer_than_within(words, 1)
    room = " " if words.startswith("`") or words.endswith("`") or not words else ""
    return f"{ticks}{room}{words}{room}{ticks}"


def block(value: object, language: str = "") -> str:
    """Lines of code."""
    ticks = _longer_than_within(str(value), 3)
    return f"{ticks}{language}\n{value}\n{ticks}"


def _longer_than_within(text: str, least: int) -> str:
    """A run of backticks that the text does not have."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    return "`" * max(least, longest + 1)
