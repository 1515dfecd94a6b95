"""Whether the model hub answers, asked once before a model is read there.

huggingface_hub repeats a request that gets no answer five times, with pauses in between: without a network, a name that
is not in its cache is refused after half a minute or more. Here the hub is asked for a sign of life first. If there is
none, huggingface_hub is put into its offline mode, in which it reads its cache and asks nobody.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any

SECONDS = 2.0  # to wait for an answer, unless HF_HUB_ETAG_TIMEOUT, huggingface_hub's own setting for this, is given
VALID = 60.0  # seconds that an answer is believed: a model is read in several steps


@dataclass
class _State:
    asked: float = float("-inf")  # when, on the monotonic clock
    endpoint: str = ""
    reason: str | None = None  # why the hub cannot be reached; None: it answered, or was not asked


_state = _State()


def check_reachable() -> None:
    """Switch huggingface_hub's offline mode on where the hub does not answer, and off again where it does. What the
    user chose with HF_HUB_OFFLINE stays."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and _state.reason is None:
        return
    if _state.endpoint == constants.ENDPOINT and time.monotonic() < _state.asked + VALID:
        return
    constants.HF_HUB_OFFLINE = False
    _state.reason = _ask(constants.ENDPOINT)
    _state.asked, _state.endpoint = time.monotonic(), constants.ENDPOINT
    constants.HF_HUB_OFFLINE = _state.reason is not None


def unreachable() -> str | None:
    """Why the hub could not be reached when it was last asked; None where it could."""
    return _state.reason


def _ask(endpoint: str) -> str | None:
    """One request, with the proxies and certificates of huggingface_hub. Any answer will do, also an error's number."""
    from huggingface_hub.utils import get_session

    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or SECONDS)
    session = get_session()
    library = _library(session)
    try:
        session.head(endpoint, timeout=seconds)
    except library.TimeoutException:
        return f"{endpoint} does not answer within {seconds:g} s (HF_HUB_ETAG_TIMEOUT=20 waits longer)"
    except library.TransportError as error:
        return f"{endpoint} does not answer: {error or type(error).__name__}"
    return None


def _library(session: Any) -> Any:
    """The library that huggingface_hub sends requests with, httpx or httpx2, for its errors."""
    packages = (sys.modules[kind.__module__.partition(".")[0]] for kind in type(session).__mro__)
    return next(package for package in packages if hasattr(package, "TransportError"))
