"""The tools of a run, with where they run and their limits: what an agent opens for each episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from covey.agents.tools import Bench, Runner, ToolSet


@dataclass
class Toolbox:
    """`runner` has the functions of users' tools; it is there when the run begins."""

    tools: ToolSet
    max_tokens: int = 512
    seconds: float = 10.0
    runner: Runner | None = None

    def schemas(self) -> list[dict[str, Any]]:
        return self.tools.schemas()

    def open(self, cut: Callable[[str, int], str]) -> Bench:
        """The bench of one episode. `cut(text, tokens)` is the beginning of a text that has so many tokens."""
        return self.tools.open(self.runner, cut=cut, max_tokens=self.max_tokens, seconds=self.seconds)
