"""`.env`: variables that a machine's owner keeps beside the work, such as keys and folders.

    # comment                          lines as a shell reads them, with or without `export`
    export WANDB_API_KEY="..."
    HF_HOME=$HOME/huggingface          $NAME and ${NAME} are variables, except between single quotes

What the shell has set already is never replaced, and a name without a value sets nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from covey.errors import InputError

_LINE = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*)")
_SINGLE = re.compile(r"'([^']*)'")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"')
_PLAIN = re.compile(r"[^\s#'\"](?:[^\s'\"]|\s+(?!#|\s|$))*")
_COMMENT = re.compile(r"\s*(?:#.*)?")
_VARIABLE = re.compile(r"\\(.)|\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


def read_env_file(path: Path) -> dict[str, str]:
    """The variables of a file, in its order; nothing where there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            if "\0" in line:
                raise InputError(f"{path}, line {number}: there is a zero byte in it")
            name, value = _assignment(line.strip(), f"{path}, line {number}", found)
            if value:
                found[name] = value
    return found


def export(variables: Mapping[str, str]) -> None:
    """For this process and those that it starts. What is set already stays."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _assignment(line: str, place: str, before: Mapping[str, str]) -> tuple[str, str]:
    match = _LINE.fullmatch(line)
    if match is None:
        raise InputError(f"{place}: not a variable\n  write NAME=value, with or without export before it")
    name, rest = match.groups()
    if _COMMENT.fullmatch(rest):
        return name, ""
    for kind in (_SINGLE, _DOUBLE, _PLAIN):
        value = kind.match(rest)
        if value is not None and _COMMENT.fullmatch(rest, value.end()):
            return name, _meaning(kind, value, before)
    raise InputError(f"{place}: the value of {name} cannot be read\n  quote it: {name}='...'")


def _meaning(kind: re.Pattern[str], value: re.Match[str], before: Mapping[str, str]) -> str:
    if kind is _SINGLE:
        return value[1]
    if kind is _DOUBLE:
        return _expanded(value[1], before)
    return os.path.expanduser(_expanded(value[0], before))


def _expanded(text: str, before: Mapping[str, str]) -> str:
    def replaced(match: re.Match[str]) -> str:
        if match[1]:  # a backslash takes the meaning from what follows it
            return match[1]
        name = match[2] or match[3]
        return os.environ.get(name, before.get(name, ""))

    return _VARIABLE.sub(replaced, text)
