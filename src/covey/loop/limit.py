"""How long a process may train."""

from __future__ import annotations

import time


class TimeLimit:
    """Looked at once a step: what it says then holds for the whole of it."""

    def __init__(self, minutes: float | None) -> None:
        self.end = None if minutes is None else time.monotonic() + 60 * minutes
        self.reached = False

    def passed(self) -> bool:
        self.reached = self.end is not None and time.monotonic() >= self.end
        return self.reached
