"""The types that telemetry is built on: facts about a run, the interface of a sink, and helpers for trackers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.storage import write_atomically

Metrics = Mapping[str, float]
EpisodeRecords = Sequence[Mapping[str, Any]]  # lines of episodes.jsonl


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run that are known before its first step and do not change."""

    folder: Path
    title: str
    algorithm: str
    model: str
    task: str
    total_steps: int
    first_step: int = 0  # number of updates already done when the run is resumed
    reward_names: tuple[str, ...] = ()
    trained_reward: str = ""  # the reward behind eval/accuracy
    config: dict[str, Any] = field(default_factory=dict)
    kind: str = "rl"  # or sft
    held_out: int = 0  # validation tasks per evaluation

    @property
    def scored_by(self) -> str:
        """`, rewards a, b` for the first line of a run; empty for SFT."""
        names = ", ".join(self.reward_names)
        return f", reward{'s' if len(self.reward_names) > 1 else ''} {names}" if names else ""


@dataclass(frozen=True)
class EpisodeView:
    """One attempt, for display. `advantage` is None for evaluation episodes."""

    question: str
    reply: str
    reward: float | None
    advantage: float | None = None
    answer: str | None = None  # the reference answer, if the task has one


class Sink:
    """Receives the events of a run. Subclasses override the events they need."""

    external = False  # an outside service: if it fails, the run continues without it

    def stage(self, name: str | None) -> None:
        """A stage begins; None: the outermost stage has ended."""

    def progress(self, done: int, total: int, what: str) -> None: ...

    def step(self, index: int, metrics: Metrics, sample: EpisodeView | None, episodes: EpisodeRecords) -> None: ...

    def evaluation(self, step: int, metrics: Metrics, sample: EpisodeView | None) -> None: ...

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def close(self, status: str) -> None: ...


def flatten(tree: Any, name: str = "", separator: str = ".") -> dict[str, Any]:
    """Nested settings by dotted name. An empty mapping stays a value."""
    if not isinstance(tree, Mapping) or not tree:
        return {name: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{name}{separator}{key}" if name else str(key), separator)
    return flat


def persistent_id(path: Path) -> str:
    """A random id kept in the run's folder, so that a resumed run continues the same page of a tracker."""
    if not path.exists():
        write_atomically(path, uuid.uuid4().hex[:8] + "\n")
    return path.read_text(encoding="ascii").strip()
