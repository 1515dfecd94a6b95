"""JSON as models write it.

Read besides strict JSON, because it can mean one thing only:

    line breaks and tabs inside a string        {"code": "a = 1
                                                 b = 2"}
    a comma after the last entry                {"a": 1,}
    Python's quotes and constants               {'a': True, 'b': None}

Anything else is `Unreadable`, and its text tells the model what to mend: a key given twice, NaN and infinity, half a
surrogate pair, nesting deeper than 64, and whatever is not JSON at all. Time grows with the length of the text only.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from covey.storage import TOO_DEEP, json_problem

# A string is taken whole or not at all (possessive), so nothing here is tried twice.
TOKEN = re.compile(r"""\s+|[{}\[\]:,]|"(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+'|[-+.\w]+""", re.DOTALL)
CONSTANTS = {"True": "true", "False": "false", "None": "null"}


class Unreadable(ValueError):
    """Not JSON, in words for the model."""


def read(text: str) -> Any:
    """The value of a text. Raises `Unreadable`."""
    try:
        value = _loads(text)
    except json.JSONDecodeError as error:
        try:
            value = _loads(_mended(text))
        except json.JSONDecodeError:
            raise Unreadable(_explain(error, text)) from error
    if (reason := json_problem(value)) is not None:
        raise Unreadable(reason)
    return value


def value_end(text: str, start: int) -> int | None:
    """Where the object or list that begins at `start` (white space aside) ends. Brackets in strings do not count."""
    depth, at = 0, start
    while token := TOKEN.match(text, at):
        at, mark = token.end(), token[0]
        if mark in "{[":
            depth += 1
        elif mark in "}]":
            depth -= 1
            if depth <= 0:
                return at if depth == 0 else None
        elif depth == 0 and not mark.isspace():
            return None
    return None


def skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _loads(text: str) -> Any:
    try:
        return json.loads(text, strict=False, parse_constant=_no_constant, object_pairs_hook=_no_key_twice)
    except (Unreadable, json.JSONDecodeError):
        raise
    except RecursionError as error:
        raise Unreadable(TOO_DEEP) from error
    except ValueError as error:
        raise Unreadable("a number has too many digits") from error


def _no_constant(word: str) -> None:
    raise Unreadable(f"{word} is not a JSON value")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        shown = json.dumps(twice[:40].encode(errors="replace").decode(), ensure_ascii=False)
        raise Unreadable(f"the key {shown} is given twice")
    return found


def _mended(text: str) -> str:
    """Strict JSON with the same meaning; the text itself where it is not made of JSON's words."""
    words, at = [], 0
    while at < len(text):
        token = TOKEN.match(text, at)
        if token is None:
            return text
        at = token.end()
        if not token[0].isspace():
            words.append(token[0])
    kept = []
    for place, word in enumerate(words):
        before, after = words[place - 1 : place], words[place + 1 : place + 2]
        if word == "," and after in (["}"], ["]"]) and before not in ([], ["{"], ["["], [","], [":"]):
            continue
        kept.append(_double_quoted(word) if word.startswith("'") else CONSTANTS.get(word, word))
    return " ".join(kept)


def _double_quoted(word: str) -> str:
    swapped = {"\\'": "'", '"': '\\"'}
    inner = re.sub(r"\\.|\"", lambda found: swapped.get(found[0], found[0]), word[1:-1], flags=re.DOTALL)
    return f'"{inner}"'


def _explain(error: json.JSONDecodeError, text: str) -> str:
    """What is wrong, where, and how it is written."""
    if not text.strip():
        return "it is empty"
    if error.msg == "Extra data":
        return f"something follows the JSON value: {_excerpt(text, error.pos)}"
    near = f"{error.msg[:1].lower()}{error.msg[1:]} at {_excerpt(text, error.pos)}"
    if "escape" in error.msg:
        return f'{near} (inside a string, a backslash is written \\\\ and a quote \\")'
    if value_end(text, 0) is None and text.lstrip()[:1] in ("{", "[") and error.pos >= len(text.rstrip()):
        return f"it ends too early, a closing bracket or quote is missing: {_excerpt(text, len(text) - 20)}"
    return near


def _excerpt(text: str, at: int) -> str:
    at = min(max(at, 0), len(text))
    shown = text[at : at + 30]
    return json.dumps(shown, ensure_ascii=False) + ("…" if len(text) > at + 30 else "") if shown.strip() else "the end"
