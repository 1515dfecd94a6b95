"""Warnings during a run: updates skipped for non-finite values, and steps from which nothing can be learned.

Tasks of skipped updates are saved when they end the run, for `covey data show FILE`:

    nonfinite-step-000012.json    the tasks of the consecutive steps with skipped updates
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
from covey.storage import StorageFailed, write_atomically
from covey.training.step import StepResult
from covey.types import Collected, Episode, Task

SHOWN = 3  # tasks that a warning names


class NonFiniteUpdates:
    """Watches for updates that were skipped because their loss or gradient was not finite."""

    def __init__(self, folder: Path, *, limit: int, skipped: int, warn: Callable[[str], None]) -> None:
        """`limit`: skipped updates in a row that end the run. `skipped`: how many were skipped before."""
        self.folder, self.limit, self.warn = folder, limit, warn
        self._skipped = float(skipped)
        self._warned = False
        self._steps: deque[tuple[int, Sequence[Task]]] = deque(maxlen=limit)

    def after_step(self, step: int, skipped: float, tasks: Sequence[Task]) -> None:
        """`skipped`: updates of the whole run that were skipped so far."""
        new, self._skipped = int(skipped - self._skipped), skipped
        if not new:
            return
        self._steps.append((step, tasks))
        if not self._warned:
            self._warned = True
            names = ", ".join(task.id for task in tasks[:SHOWN]) + (", …" if len(tasks) > SHOWN else "")
            self.warn(
                f"step {step + 1}: {new} update{'s' * (new > 1)} skipped: the loss or gradient is not finite, the "
                f"weights are unchanged (tasks {names}). They are counted as optim/skipped; "
                f"learner.max_skipped={self.limit} in a row end the run"
            )

    def run_failed(self, step: int, tasks: Sequence[Task], error: BaseException) -> None:
        """Save the tasks of the skipped updates in a row, and add to the error where they are."""
        self._steps.append((step, tasks))
        path = self.folder / f"nonfinite-step-{step:06d}.json"
        try:
            write_atomically(path, hide_known(json.dumps(self._records(), indent=1, default=str)))
        except StorageFailed as full:
            error.add_note(f"  the tasks could not be saved: {full}")
            return
        error.add_note(
            f"  the tasks of these steps:  covey data show {shlex.quote(str(path))}\n"
            f"  answers that were recorded before:  covey dash {shlex.quote(str(self.folder))}"
        )

    def _records(self) -> list[dict[str, Any]]:
        """Each task once, with its steps."""
        records: dict[str, dict[str, Any]] = {}
        for step, tasks in self._steps:
            for task in tasks:
                new = {"data_id": task.id, "messages": list(task.messages), "answer": task.answer, "steps": []}
                records.setdefault(task.id, new)["steps"].append(step)
        return list(records.values())


# -- Steps without signal ----------------------------------------------------------------------------------------------

FIRST = 3  # steps at the start over which rewards must differ
# Share of episodes cut off that is worth a warning, and that is the likely cause if rewards do not differ: unfinished
# episodes are often not scored, or all score the same.
CUT, MOST = 0.3, 0.5
FIXES = {
    "rollout.max_tokens": "raise rollout.max_tokens",
    "agent.max_response_tokens": "raise agent.max_response_tokens",
    "model.context_length": "raise model.context_length if the model allows it, or lower agent.max_tool_tokens",
    "agent.max_turns": "raise agent.max_turns",
    "request": "raise the max_tokens that your agent asks for",
}


@dataclass
class StepWarnings:
    """Warns once about each problem that a step shows: failed episodes, tools that raise, episodes that are cut off,
    and rewards that never differ."""

    warn: Callable[[str], None]
    rewards: Sequence[str]  # names of the rewards with a weight
    total_steps: int
    limits: Mapping[str, object]  # values of the settings in `covey.types.CUT_BY`
    group_of_one: bool = False  # one attempt per task: attempts at different tasks are compared
    roles: Mapping[str, Sequence[str]] = field(default_factory=dict)  # that settings name, by setting
    rewards_trained: bool = True  # False: a teacher alone is learned from
    _warned: set[str] = field(default_factory=set)
    _steps_without_signal: int = 0  # among the first steps
    _recent: deque[Collected] = field(default_factory=lambda: deque(maxlen=FIRST))

    def after_step(self, index: int, result: StepResult, metrics: Metrics) -> None:
        collected = result.collected
        self._recent.append(collected)
        episodes = [episode for group in collected.groups for episode in group.episodes]
        self._check_trained(index, episodes)
        if self.rewards_trained:
            self._check_signal(index, metrics)
        self._check_cut()
        for cause in collected.failures:
            self._warn_once(cause, f"episodes are failing ({cause}), the first: {collected.examples[cause]}")
        self._check_tools(episodes)
        self._check_roles([*episodes, *(e for group in collected.zero_variance for e in group.episodes)])

    def _warn_once(self, subject: str, text: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            self.warn(text)

    def _check_tools(self, episodes: Sequence[Episode]) -> None:
        """An error of a tool is shown to the model and does not fail the episode, so the user would not see it."""
        uses = [use for episode in episodes for use in episode.tools]
        calls = Counter(use.tool for use in uses)
        for use in uses:
            if use.detail:
                alike = sum(other.tool == use.tool and bool(other.detail) for other in uses)
                often = f"in {alike} of {calls[use.tool]} calls"
                what = f"raised {often}, the first: {use.detail}" if use.error == "raised" else f"{often}: {use.detail}"
                self._warn_once(f"tool {use.tool}", f"tool {use.tool} {what}\n  the model sees the error and continues")

    def _check_roles(self, episodes: Sequence[Episode]) -> None:
        """A misspelt role would leave a run without what its setting asks for."""
        seen = list(dict.fromkeys(turn.role for episode in episodes for turn in episode.turns if turn.role is not None))
        for setting, roles in self.roles.items():
            for role in (role for role in roles if role not in seen):
                found = f"the turns have the roles {', '.join(seen)}" if seen else "no turn has a role"
                self._warn_once(
                    f"{setting} {role}", f"{setting} names the role {role}, which was not seen so far: {found}"
                )

    def _check_trained(self, index: int, episodes: Sequence[Episode]) -> None:
        """Warn about a step without a token to train on."""
        turns = [turn for episode in episodes for turn in episode.turns]
        if not turns or any(turn.trained for turn in turns):
            return
        named = [f"{setting}=[{', '.join(roles)}]" for setting, roles in self.roles.items() if roles]
        cause = f"check {' and '.join(named)}" if named else "the agent asks for every turn with trained=False"
        self._warn_once("trained", f"step {index + 1}: no token can be trained on: no turn is trained; {cause}")

    def _check_cut(self) -> None:
        """Warn when the first episode fails because it was cut off, or when many are cut off in several steps."""
        shares = [_share(collected) for collected in self._recent]
        persistent = len(shares) == min(FIRST, self.total_steps) and min(shares) >= CUT
        if persistent or "truncated" in self._recent[-1].failures:
            self._warn_once("truncated", f"{self._cut_text()}; {self._fix()}")

    def _check_signal(self, index: int, metrics: Mapping[str, float]) -> None:
        """Warn if the first steps had only zero-variance groups: usually the reward does not fit the answers, or nearly
        all episodes are cut off."""
        first = min(FIRST, self.total_steps)
        if index >= first or not (metrics["reward/std"] == 0 if self.group_of_one else metrics["groups/flat"] == 1):
            return
        self._steps_without_signal += 1
        if self._steps_without_signal < first:
            return
        steps = "the first step" if first == 1 else f"each of the first {first} steps"
        no_variance = (
            f"in {steps}, all attempts at a task got the same reward "
            f"({', '.join(self.rewards)}, mean {metrics['reward/mean']:g})"
        )
        if min(map(_share, self._recent)) >= MOST:
            self._warned.add("truncated")
            self.warn(f"{self._cut_text()}; {no_variance}; {self._fix()}")
        else:
            self.warn(
                f"no signal to learn from: {no_variance}; check that the reward fits the answers "
                "(covey sample shows them) and how hard the tasks are"
            )

    def _cut_text(self) -> str:
        attempts = sum(collected.attempts for collected in self._recent)
        shares = ", ".join(
            f"{count / attempts:.0%} by {self._name(limit)}" for limit, count in self._cut().most_common()
        )
        lost = sum(collected.failures.get("truncated", 0) for collected in self._recent)
        scored = f"{lost} of {attempts} are not scored and dropped" if lost else "they are scored unfinished"
        return f"episodes are cut off: {shares}; {scored}"

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
