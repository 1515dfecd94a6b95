"""A JSON parser for the small deviations of language models.

Besides strict JSON it accepts deviations that have only one possible meaning:

    line breaks and tabs inside a string        {"code": "a = 1
                                                 b = 2"}
    a comma after the last entry                {"a": 1,}
    Python's quotes and constants               {'a': True, 'b': None}

Anything else raises `InvalidJson`, whose text tells the model what to correct: duplicate keys, NaN and infinity, lone
surrogates, nesting deeper than 64, and any other syntax error. Parsing takes linear time.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from covey.storage import TOO_DEEP, json_problem

# Possessive quantifiers prevent backtracking.
TOKEN = re.compile(r"""\s+|[{}\[\]:,]|"(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+'|[-+.\w]+""", re.DOTALL)
CONSTANTS = {"True": "true", "False": "false", "None": "null"}


class InvalidJson(ValueError):
    """A text that is not JSON. The message is for the model."""


def parse_json(text: str) -> Any:
    """The value of a text, or `InvalidJson`."""
    try:
        value = _loads(text)
    except json.JSONDecodeError as error:
        try:
            value = _loads(_repair(text))
        except json.JSONDecodeError:
            raise InvalidJson(_explain(error, text)) from error
    if (reason := json_problem(value)) is not None:
        raise InvalidJson(reason)
    return value


def value_end(text: str, start: int) -> int | None:
    """The end of the object or list that begins at `start` or after white space. Brackets in strings are ignored."""
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
        return json.loads(text, strict=False, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except (InvalidJson, json.JSONDecodeError):
        raise
    except RecursionError as error:
        raise InvalidJson(TOO_DEEP) from error
    except ValueError as error:
        raise InvalidJson("a number has too many digits") from error


def _refuse_constant(word: str) -> None:
    raise InvalidJson(f"{word} is not a JSON value")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        shown = json.dumps(twice[:40].encode(errors="replace").decode(), ensure_ascii=False)
        raise InvalidJson(f"the key {shown} is given twice")
    return value


def _repair(text: str) -> str:
    """Strict JSON with the same meaning; the text itself if it has other tokens than JSON's."""
    tokens, at = [], 0
    while at < len(text):
        token = TOKEN.match(text, at)
        if token is None:
            return text
        at = token.end()
        if not token[0].isspace():
            tokens.append(token[0])
    kept = []
    for place, word in enumerate(tokens):
        before, after = tokens[place - 1 : place], tokens[place + 1 : place + 2]
        if word == "," and after in (["}"], ["]"]) and before not in ([], ["{"], ["["], [","], [":"]):
            continue
        kept.append(_double_quoted(word) if word.startswith("'") else CONSTANTS.get(word, word))
    return " ".join(kept)


def _double_quoted(word: str) -> str:
    escapes = {"\\'": "'", '"': '\\"'}
    inner = re.sub(r"\\.|\"", lambda match: escapes.get(match[0], match[0]), word[1:-1], flags=re.DOTALL)
    return f'"{inner}"'


def _explain(error: json.JSONDecodeError, text: str) -> str:
    """The error in words for the model: what is wrong, and where."""
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
