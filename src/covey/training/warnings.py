"""Tasks whose updates were left out, because a loss or a gradient was not finite: told in words, and saved when there
are so many in a row that the run ends.

    nonfinite-step-000012.json    the tasks of the steps in a row, for: covey data show FILE
"""

from __future__ import annotations

import json
import shlex
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.protocols import Metrics
from covey.redact import hide_known
from covey.rollout.collector import limit_name
from covey.storage import StorageFailed, write_whole
from covey.training.step import StepResult
from covey.types import Collected, Episode, Task

SHOWN = 3  # tasks that a warning names


class Offenders:
    def __init__(self, folder: Path, *, limit: int, skipped: int, warn: Callable[[str], None]) -> None:
        """`limit`: updates left out in a row that end the run. `skipped`: so many were left out before."""
        self.folder, self.limit, self.warn = folder, limit, warn
        self._skipped = float(skipped)
        self._told = False
        self._steps: deque[tuple[int, Sequence[Task]]] = deque(maxlen=limit)

    def after(self, step: int, skipped: float, tasks: Sequence[Task]) -> None:
        """A step was made; `skipped` updates of the run so far were left out."""
        new, self._skipped = int(skipped - self._skipped), skipped
        if not new:
            return
        self._steps.append((step, tasks))
        if not self._told:
            self._told = True
            names = ", ".join(task.id for task in tasks[:SHOWN]) + (", …" if len(tasks) > SHOWN else "")
            self.warn(
                f"step {step + 1}: {new} update{'s' * (new > 1)} left out, whose loss or gradient is not finite; the "
                f"weights stay as they were (tasks {names}). They are counted as optim/skipped; "
                f"learner.max_skipped={self.limit} in a row end the run"
            )

    def end(self, step: int, tasks: Sequence[Task], error: BaseException) -> None:
        """The step that was one too many: its tasks and those of the ones before are saved, the error says where."""
        self._steps.append((step, tasks))
        path = self.folder / f"nonfinite-step-{step:06d}.json"
        try:
            write_whole(path, hide_known(json.dumps(self._records(), indent=1, default=str)))
        except StorageFailed as full:
            error.add_note(f"  the tasks could not be saved: {full}")
            return
        error.add_note(
            f"  the tasks of these steps:  covey data show {shlex.quote(str(path))}\n"
            f"  answers that were recorded before:  covey dash {shlex.quote(str(self.folder))}"
        )

    def _records(self) -> list[dict[str, Any]]:
        """Each task once, with the steps it was in."""
        found: dict[str, dict[str, Any]] = {}
        for step, tasks in self._steps:
            for task in tasks:
                blank = {"data_id": task.id, "messages": list(task.messages), "answer": task.answer, "steps": []}
                found.setdefault(task.id, blank)["steps"].append(step)
        return list(found.values())


# -- What a run warns of after a step: code that raised, episodes that are cut off, and rewards that never differ ------
# Each warning is given once. Where most episodes are cut off, that is reported as the cause of what follows from it: an
# unfinished episode is often not scored, or scored like all the others.

FIRST = 3  # first steps after which a run whose rewards never differ is warned of
CUT, MOST = 0.3, 0.5  # share of episodes cut off: worth a warning; the likely cause where the rewards do not differ
FIXES = {
    "rollout.max_tokens": "raise rollout.max_tokens",
    "agent.max_response_tokens": "raise agent.max_response_tokens",
    "model.context_length": "raise model.context_length if the model allows it, or lower agent.max_tool_tokens",
    "agent.max_turns": "raise agent.max_turns",
    "request": "raise the max_tokens that your agent asks for",
}


@dataclass
class StepWarnings:
    """`rewards`: the names of those that count; `limits`: the values of the settings in `covey.types.CUT_BY`; `single`:
    attempts at different tasks are compared."""

    warn: Callable[[str], None]
    rewards: Sequence[str]
    total_steps: int
    limits: Mapping[str, object]
    single: bool = False
    _warned: set[str] = field(default_factory=set)
    _steps_without_signal: int = 0  # among the first
    _recent: deque[Collected] = field(default_factory=lambda: deque(maxlen=FIRST))

    def after(self, index: int, result: StepResult, metrics: Metrics) -> None:
        collected = result.collected
        self._recent.append(collected)
        episodes = [episode for group in collected.groups for episode in group.episodes]
        self._check_signal(index, metrics)
        self._check_cut()
        for cause in collected.failures:
            self._once(cause, f"episodes are failing ({cause}), the first: {collected.examples[cause]}")
        self._check_tools(episodes)

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

    def _check_cut(self) -> None:
        """Warn of cut episodes at the first one that is lost by it, or when they are many in several steps."""
        shares = [_share(collected) for collected in self._recent]
        lasting = len(shares) == min(FIRST, self.total_steps) and min(shares) >= CUT
        if lasting or "truncated" in self._recent[-1].failures:
            self._once("truncated", f"{self._cut_text()}; {self._fix()}")

    def _check_signal(self, index: int, metrics: Mapping[str, float]) -> None:
        """Warn where all of the first steps had only zero-variance groups: most often the reward does not fit, or
        nearly all episodes are cut off."""
        first = min(FIRST, self.total_steps)
        if index >= first or not (metrics["reward/std"] == 0 if self.single else metrics["groups/flat"] == 1):
            return
        self._steps_without_signal += 1
        if self._steps_without_signal < first:
            return
        steps = "the first step" if first == 1 else f"each of the first {first} steps"
        alike = (
            f"in {steps}, all attempts at a task got the same reward "
            f"({', '.join(self.rewards)}, mean {metrics['reward/mean']:g})"
        )
        if min(map(_share, self._recent)) >= MOST:
            self._warned.add("truncated")
            self.warn(f"{self._cut_text()}; {alike}; {self._fix()}")
        else:
            self.warn(
                f"no signal to learn from: {alike}; check that the reward fits the answers (covey sample shows them) "
                "and how hard the tasks are"
            )

    def _cut_text(self) -> str:
        attempts = sum(collected.attempts for collected in self._recent)
        found = ", ".join(
            f"{count / attempts:.0%} by {self._name(limit)}" for limit, count in self._cut().most_common()
        )
        lost = sum(collected.failures.get("truncated", 0) for collected in self._recent)
        scored = f"{lost} of {attempts} are not scored and left out" if lost else "they are scored unfinished"
        return f"episodes are cut off: {found}; {scored}"

    def _fix(self) -> str:
        fixes = [FIXES[limit] for limit, _ in self._cut().most_common()]
        if any(collected.failures.get("truncated") for collected in self._recent):
            fixes.append("let the environment score unfinished episodes (end, docs/environments.md)")
        return "; or ".join(fixes)

    def _cut(self) -> Counter[str]:
        return sum((Counter(collected.cut) for collected in self._recent), Counter())

    def _name(self, limit: str) -> str:
        value = self.limits.get(limit)
        return limit_name(limit) if value is None else f"{limit}={value}"


def _share(collected: Collected) -> float:
    return sum(collected.cut.values()) / max(1, collected.attempts)
