"""What a run trains on and is tested on."""

from __future__ import annotations

from dataclasses import dataclass

from covey.types import Task


@dataclass(frozen=True)
class TaskSet:
    train: tuple[Task, ...]
    validation: tuple[Task, ...]
    reward: str | None  # what scores these tasks when the user names no reward
    description: str
    warnings: tuple[str, ...] = ()
