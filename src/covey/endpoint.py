"""JSON requests to an HTTP endpoint of the user, with retries."""

from __future__ import annotations

import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, TypeVar

T = TypeVar("T")


class EndpointError(Exception):
    """The endpoint refused a request, or gave no usable answer in time."""


@dataclass(frozen=True)
class Endpoint:
    url: str  # http or https
    api_key_env: str | None  # the environment variable that holds the key
    retries: int  # after 429, 5xx, connection errors and unreadable answers
    max_bytes: int  # of an answer
    max_pause: float  # seconds between attempts
    closing: threading.Event  # ends the pauses
    on_failure: Callable[[int, str], None] | None = None  # before a pause: failed attempts, the last error

    def post(self, request: Mapping[str, Any], read: Callable[[Any], T], deadline: float) -> T:
        """What `read` makes of the answer to a request; `read` raises LookupError, TypeError or ValueError if it cannot
        use it. `deadline`: on time.monotonic()'s clock."""
        for attempt in range(self.retries + 1):
            pause = min(self.max_pause, 0.5 * 2**attempt) * random.uniform(0.75, 1.25)
            try:
                return read(json.loads(self._send(request, deadline)))
            except urllib.error.HTTPError as error:
                why = f"{error.code} {error.reason}{_excerpt(error)}"
                if error.code != 429 and error.code < 500:
                    raise EndpointError(f"{self.url} refuses: {why}") from error
                if (retry_after := error.headers.get("Retry-After", "")).isdigit():
                    pause = float(retry_after)
            except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:  # no connection, or bad JSON
                why = f"{type(error).__name__}: {error}"
            if attempt == self.retries or time.monotonic() + pause > deadline:
                break
            if self.on_failure is not None:
                self.on_failure(attempt + 1, why)
            if self.closing.wait(pause):
                break
        raise EndpointError(f"{self.url} gave no answer after {attempt + 1} attempts: {why}")

    def _send(self, request: Mapping[str, Any], deadline: float) -> bytes:
        message = urllib.request.Request(  # noqa: S310 - http or https
            self.url, json.dumps(request).encode(), headers={"Content-Type": "application/json"}
        )
        if self.api_key_env is not None:  # not sent along on a redirect
            message.add_unredirected_header("Authorization", f"Bearer {os.environ.get(self.api_key_env, '')}")
        body = b""
        timeout = max(0.01, deadline - time.monotonic())
        with urllib.request.urlopen(message, timeout=timeout) as response:  # noqa: S310 - as above
            while part := response.read1(1 << 16):
                body += part
                if time.monotonic() > deadline or len(body) > self.max_bytes:
                    raise TimeoutError("the reply does not end")
        return body


def _excerpt(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(300).decode(errors="replace").strip()
    except (OSError, HTTPException):
        text = ""
    return f": {text}" if text else ""
