"""What a run tells about itself, and what a place that listens must answer to."""

from __future__ import annotations

import importlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.errors import Absent
from covey.imports import install_extra
from covey.storage import write_atomically


@dataclass(frozen=True)
class RunInfo:
    """Who is running: known before the first step and fixed to the last."""

    folder: Path
    title: str
    algorithm: str
    model: str
    task: str
    total_steps: int
    first_step: int = 0  # more than 0 when resumed: that many updates are done
    reward_names: tuple[str, ...] = ()
    trained_reward: str = ""  # the reward that eval/accuracy stands for
    config: dict[str, Any] = field(default_factory=dict)
    kind: str = "rl"  # or sft: what is worth watching
    held_out: int = 0  # tasks that an evaluation asks

    @property
    def scored_by(self) -> str:
        """The rewards in force, for the first line of a run; empty for sft."""
        names = ", ".join(self.reward_names)
        return f", reward{'s' if len(self.reward_names) > 1 else ''} {names}" if names else ""


@dataclass(frozen=True)
class EpisodeView:
    """One attempt as a person reads it. `advantage` is None where nothing is learned from it (evaluation)."""

    question: str
    reply: str
    reward: float | None
    advantage: float | None = None
    answer: str | None = None  # the reference, where the task has one


class Sink:
    """A place that listens to a run. It overrides what it cares for and ignores the rest."""

    elsewhere = False  # a service that may break down without an end to the run

    def stage(self, name: str | None) -> None:
        """What runs from now on; None: nothing that is measured."""

    def progress(self, done: int, total: int, what: str) -> None: ...

    def step(
        self,
        index: int,
        metrics: Mapping[str, float],
        sample: EpisodeView | None,
        episodes: Sequence[Mapping[str, Any]],
    ) -> None: ...

    def evaluation(self, step: int, metrics: Mapping[str, float], sample: EpisodeView | None) -> None: ...

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def close(self, status: str) -> None: ...


class Tracker(Sink, ABC):
    """A place for figures alone, those of steps and of evaluations alike."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def step(
        self,
        index: int,
        metrics: Mapping[str, float],
        sample: EpisodeView | None,
        episodes: Sequence[Mapping[str, Any]],
    ) -> None:
        self.log(index, metrics)

    def evaluation(self, step: int, metrics: Mapping[str, float], sample: EpisodeView | None) -> None:
        self.log(step, metrics)


def flat(tree: Any, name: str = "") -> dict[str, Any]:
    """Settings by their dotted names."""
    if not isinstance(tree, Mapping) or not tree:
        return {name: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{name}.{key}" if name else str(key))
    return found


def lasting_id(path: Path) -> str:
    """An id that is drawn once and kept in the run's folder, so that a resumed run continues the same page."""
    if not path.exists():
        write_atomically(path, uuid.uuid4().hex[:8] + "\n")  # who is killed here draws another one
    return path.read_text(encoding="ascii").strip()


def require(module: str, extra: str) -> Any:
    """Import what an extra installs, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Absent(
            f"logging.to={extra} needs the package {extra}, which is not installed ({error})\n"
            f"  install it:  {install_extra(extra)}"
        ) from error
