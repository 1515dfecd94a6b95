"""The JSON of a request. What JSON can say, but nothing after it can take, is refused here with a reason."""

from __future__ import annotations

import json
from typing import Any

from covey.gateway.refusal import Refused
from covey.json_values import TOO_DEEP, flaw


def read_body(raw: bytes | bytearray) -> dict[str, Any]:
    try:
        body = json.loads(raw or b"{}")
        reason = flaw(body)
    except RecursionError:
        reason = TOO_DEEP
    except ValueError as error:  # also what is not UTF-8, and numbers of thousands of digits
        raise Refused(400, f"not JSON: {error!s:.200}") from error
    if reason is not None:
        raise Refused(400, f"not JSON that is read here: {reason}")
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    return body
