"""What a run warns of after a step: code that raised, cut episodes, and rewards that never differ.

Each warning is given once. Where episodes are cut off, that is named as the cause, and not what follows from it: an
unfinished episode is often not scored at all, or scored like all the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from covey.loop.step import StepResult
from covey.protocols import Metrics
from covey.types import Episode

WITHOUT_SIGNAL = 3  # first steps after which a run whose rewards never differ is warned of


@dataclass
class StepWarnings:
    """`rewards`: the names of those that count; `single`: attempts at different tasks are compared."""

    warn: Callable[[str], None]
    rewards: Sequence[str]
    total_steps: int
    single: bool = False
    _warned: set[str] = field(default_factory=set)
    _steps_without_signal: int = 0  # among the first WITHOUT_SIGNAL

    def after(self, index: int, result: StepResult, metrics: Metrics) -> None:
        collected = result.collected
        self._check_signal(index, metrics)
        for cause in collected.failures:
            self._once(cause, f"episodes are failing ({cause}), the first: {collected.examples[cause]}")
        self._check_tools([episode for group in collected.groups for episode in group.episodes])

    def _once(self, subject: str, text: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            self.warn(text)

    def _check_tools(self, episodes: Sequence[Episode]) -> None:
        """A tool that raises costs no episode: the model reads the error, and without this the user would not."""
        uses = [use for episode in episodes for use in episode.tools]
        calls = Counter(use.tool for use in uses)
        for use in uses:
            if use.detail:
                raised = sum(other.tool == use.tool and bool(other.detail) for other in uses)
                self._once(
                    f"tool {use.tool}",
                    f"tool {use.tool} raised in {raised} of {calls[use.tool]} calls, the first: {use.detail}\n"
                    "  the model is shown the error and goes on",
                )

    def _check_signal(self, index: int, metrics: Mapping[str, float]) -> None:
        """Warn where all of the first steps had only zero-variance groups: most often the reward does not fit."""
        first = min(WITHOUT_SIGNAL, self.total_steps)
        if index >= first or not (metrics["reward/std"] == 0 if self.single else metrics["groups/flat"] == 1):
            return
        self._steps_without_signal += 1
        if self._steps_without_signal == first:
            names = ", ".join(self.rewards)
            steps = "the first step" if first == 1 else f"each of the first {first} steps"
            self.warn(
                f"no signal to learn from: in {steps}, all attempts at a task got the same reward "
                f"({names}, mean {metrics['reward/mean']:g}); check that the reward fits the answers "
                "(covey sample shows them), that rollout.max_tokens is enough, and how hard the tasks are"
            )
