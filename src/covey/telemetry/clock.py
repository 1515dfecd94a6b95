"""Wall time per stage."""

from __future__ import annotations

from collections.abc import Callable


class StageClock:
    """Adds up the seconds of each stage until they are taken. A stage inside a stage belongs to the outer one, so
    that the stages of a step add up to its time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._running: list[str] = []
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    @property
    def current(self) -> str | None:
        return self._running[-1] if self._running else None

    def enter(self, name: str) -> None:
        if not self._running:
            self._since = self._now()
        self._running.append(name)

    def leave(self) -> None:
        self._charge()
        self._running.pop()

    def take(self, *, evaluation: bool) -> dict[str, float]:
        """Seconds since they were last taken: those of evaluation, or those of everything else."""
        self._charge()
        names = [name for name in self._seconds if (name == "evaluate") == evaluation]
        return {name: self._seconds.pop(name) for name in names}

    def _charge(self) -> None:
        if not self._running:
            return
        now = self._now()
        outer = self._running[0]
        self._seconds[outer] = self._seconds.get(outer, 0.0) + now - self._since
        self._since = now
