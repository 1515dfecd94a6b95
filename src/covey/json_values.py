"""What JSON can write down but nothing after it can take: nesting and numbers without end, half characters."""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 64  # lists and objects inside each other
TOO_DEEP = f"it is nested more than {DEEPEST} levels deep"
HALF_CHARACTER = "a string has half of a surrogate pair (\\ud800 to \\udfff)"
NOT_FINITE = "a number is too large, or not finite"


def flaw(value: Any) -> str | None:
    """The reason why a value that was read is not taken; None: it is."""
    if not shallow(value):
        return TOO_DEEP
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return HALF_CHARACTER
    except ValueError:
        return NOT_FINITE
    return None


def shallow(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for one in level if isinstance(one, dict | list) for inner in _inside(one)]
    return not any(isinstance(one, dict | list) for one in level)


def _inside(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
