"""Helpers for conversations: the end of thinking and fenced code blocks in replies, additions to system messages, and
special tokens in texts.

Fences follow CommonMark: three or more backticks or tildes, then optionally a language. The block ends at a line with
at least as many of the same character, indented by less than four spaces, or at the end of the text. The indentation of
the opening fence, which may be part of a list, is removed from every line. Deviations: a fence may be indented by more
than three spaces and may follow `</think>` on its line; and a Python block ends at the first fence where its code is
complete, so that a fence in a docstring does not end it.
"""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from covey.types import Messages

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
# If the prompt opened the thinking, the reply only closes it, at the edge of a line and not inside a JSON string.
ONLY_CLOSED = re.compile(rf"^[ \t]*+{THINK_CLOSE}|{THINK_CLOSE}[ \t]*+$", re.MULTILINE)

PYTHON = ("python", "py", "python3")
OPENING = re.compile(
    rf"(?:^|(?<={THINK_CLOSE}))(?P<indent>[ \t]*+(?:(?:[-*+]|\d{{1,9}}[.)])[ \t]++)*+)"  # - ```python
    r"(?P<fence>`{3,}+(?=[^`\n]*$)|~{3,}+)[ \t]*+[{.]*+(?P<language>\w*+)[^\n]*+$",
    re.MULTILINE,
)
CLOSING = re.compile(r"^([ \t]*+)(`{3,}+|~{3,}+)[ \t\r]*+$", re.MULTILINE)
MAX_PARSED = 50_000  # characters of code
MAX_TRIED = 10  # closing fences tried per block


def thinking_end(text: str) -> int | None:
    """The position after a reply's thinking: 0 if there is none, None if it never ends. Thinking is `<think>…</think>`
    at the beginning of the reply; if the prompt opened it, everything up to a `</think>` at the edge of a line."""
    begin = len(text) - len(text.lstrip())
    if text.startswith(THINK_OPEN, begin):
        end = text.find(THINK_CLOSE, begin)
        return None if end < 0 else end + len(THINK_CLOSE)
    closed = ONLY_CLOSED.search(text)
    if closed is None or THINK_OPEN in text[: closed.start()]:
        return 0
    return closed.end()


@dataclass(frozen=True, slots=True)
class Block:
    language: str  # lower case; "" if none is named
    code: str  # with line ends
    end: int  # after its closing fence, or the end of the text
    closed: bool


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a text, in order."""
    result, opening = [], OPENING.search(text)
    while opening is not None:
        result.append(block_at(text, opening))
        opening = OPENING.search(text, result[-1].end)
    return result


def unfenced(text: str, languages: Collection[str] | None = None) -> str | None:
    """The code of a text that is one closed block and nothing else, in one of `languages` if given."""
    text = text.strip()
    opening = OPENING.match(text)
    if opening is None or (languages is not None and opening["language"].lower() not in languages):
        return None
    block = block_at(text, opening)
    return block.code.removesuffix("\n") if block.closed and block.end == len(text) else None


def is_python(opening: re.Match[str]) -> bool:
    """Whether a match of OPENING starts a Python block."""
    return opening["language"].lower() in PYTHON


def block_at(text: str, opening: re.Match[str]) -> Block:
    """The block that starts at a match of OPENING."""
    begin, indent = min(opening.end() + 1, len(text)), len(opening["indent"].expandtabs(4))
    same = (one for one in CLOSING.finditer(text, begin) if one[2].startswith(opening["fence"]))
    closings = list(itertools.islice(same, MAX_TRIED))
    strict = [one for one in closings if len(one[1].expandtabs(4)) < indent + 4]
    closing = next(iter(strict or closings), None)
    if is_python(opening):
        whole = (one for one in closings if _parses(_code(text[begin : one.start()], indent)))
        closing = next(whole, closing)
    code = _code(text[begin : len(text) if closing is None else closing.start()], indent)
    if opening[0].endswith("\r"):
        code = code.replace("\r\n", "\n")
    end = len(text) if closing is None else closing.end()
    return Block(opening["language"].lower(), code, end, closing is not None)


def _parses(code: str) -> bool:
    if len(code) > MAX_PARSED:
        return False
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            ast.parse(textwrap.dedent(code))  # it may be the body of a function
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _code(lines: str, indent: int) -> str:
    """The lines without up to `indent` columns of white space; unchanged if only the fence was indented."""
    first = next((line for line in lines.split("\n") if line.strip()), "")
    if indent == 0 or not first.startswith((" ", "\t")):
        return lines
    return "\n".join(_cut(line, indent) for line in lines.split("\n"))


def _cut(line: str, indent: int) -> str:
    plain = line.lstrip(" \t")
    return line[: len(line) - len(plain)].expandtabs(4)[indent:] + plain


def with_system(messages: Messages, text: str | None) -> Messages:
    """Messages with a text at the end of their system message."""
    if not text:
        return messages
    first, rest = messages[0], messages[1:]
    if first["role"] != "system":
        return ({"role": "system", "content": text}, *messages)
    return ({**first, "content": f"{first['content']}\n\n{text}"}, *rest)


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """The texts of a tokenizer's special tokens."""
    added = tokenizer.added_tokens_decoder.values()
    return tuple(sorted({str(token) for token in added if token.special} | {*tokenizer.all_special_tokens}))


def escape(value: Any, special: Iterable[str]) -> Any:
    """Escape special tokens in the texts of a value: `<|im_end|>` becomes `< |im_end|>`. Otherwise a text could end its
    own turn and write the next one."""
    if isinstance(value, str):
        for token in special:
            if token in value:
                value = value.replace(token, f"{token[0]} {token[1:]}")
        return value
    if isinstance(value, Mapping):
        return {escape(name, special): escape(one, special) for name, one in value.items()}
    return [escape(one, special) for one in value] if isinstance(value, list | tuple) else value
