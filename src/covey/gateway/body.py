"""The JSON of a request. What JSON can say, but nothing after it can take, is refused here with a reason."""

from __future__ import annotations

import json
from typing import Any

from covey.gateway.refusal import Refused

DEEPEST = 64  # lists and objects inside each other


def read_body(raw: bytes | bytearray) -> dict[str, Any]:
    try:
        body = json.loads(raw or b"{}")
        if raw.count(b"[") + raw.count(b"{") > DEEPEST and not shallow(body):
            raise RecursionError
    except RecursionError:
        raise Refused(400, f"not JSON that is read here: nested more than {DEEPEST} levels deep") from None
    except ValueError as error:  # also what is not UTF-8, and numbers of thousands of digits
        raise Refused(400, f"not JSON: {error!s:.200}") from error
    try:
        json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refused(400, "not JSON that is read here: a string has half of a surrogate pair") from None
    except ValueError:
        raise Refused(400, "not JSON that is read here: a number is not finite") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    return body


def shallow(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [inner for one in level if isinstance(one, dict | list) for inner in _inside(one)]
    return not level


def _inside(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
