"""Which engine gets a request: the one that has computed the beginning of its prompt, unless it has too much to do.

Attempts at a task begin with the same prompt, and later turns of an episode go on from it. Who was asked with a prompt
is its home; the home of the longest known beginning counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SLACK = 8  # requests that a home may have more than whoever has the fewest
_BASE, _PRIME = 1_000_003, 2**61 - 1


class Router:
    def __init__(self) -> None:
        self._homes: dict[int, int] = {}  # hash of a whole prompt → engine

    def pick(self, prompt: Sequence[int], loads: Mapping[int, int]) -> int:
        """One of the engines in `loads`, which says how much each has to do."""
        idlest = min(loads, key=lambda engine: (loads[engine], engine))
        home, whole = None, 0
        for token in prompt:
            whole = (whole * _BASE + token + 1) % _PRIME
            home = self._homes.get(whole, home)
        if home is None or home not in loads:
            self._homes[whole] = idlest
            return idlest
        self._homes.setdefault(whole, home)
        return home if loads[home] <= loads[idlest] + SLACK else idlest

    def forget(self) -> None:
        """New weights: what engines have computed is void."""
        self._homes.clear()
