"""The tools of a run, with where they run and their limits: what an agent opens for each episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from covey.agents.tools import Bench, Runner, ToolSet
from covey.protocols import Policy


@dataclass(frozen=True)
class Toolbox:
    """`runner` has the functions of users' tools; it is there when the run begins."""

    tools: ToolSet
    max_tokens: int = 512
    seconds: float = 10.0
    runner: Runner | None = None

    def schemas(self) -> list[dict[str, Any]]:
        return self.tools.schemas()

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """What a pool of workers must have for `in_workers`."""
        return self.tools.functions

    def in_workers(self, pool: Runner) -> Toolbox:
        """The same, with users' tools in killable processes."""
        return replace(self, runner=pool)

    def open(self, policy: Policy) -> Bench:
        """The bench of the episode that this policy plays."""
        return self.tools.open(
            self.runner, cut=policy.cut, max_tokens=self.max_tokens, seconds=self.seconds, waiting=policy.waiting
        )
