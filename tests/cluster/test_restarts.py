"""A run that lost a learner begins again, so many times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from covey.cluster.learner import LearnerLost, with_restarts


@dataclass
class Attempt:
    path: Path


def runs(losses: int, limit: int) -> tuple[list[Path | None], list[str], int]:
    """Folders that runs were made from, what was said, and the number of the run that came to its end."""
    asked: list[Path | None] = []
    said: list[str] = []

    def make(folder: Path | None) -> Attempt:
        asked.append(folder)
        return Attempt(Path(f"run-{len(asked)}"))

    def complete(run: Attempt) -> None:
        if len(asked) <= losses:
            raise LearnerLost("a learner died: killed\n  more")

    found = with_restarts(make, complete, limit=limit, note=said.append)
    return asked, said, int(found.path.name.removeprefix("run-"))


def test_it_goes_on_from_the_folder_of_the_one_before() -> None:
    assert runs(0, 3) == ([None], [], 1)
    asked, said, number = runs(2, 3)
    assert (asked, number) == ([None, Path("run-1"), Path("run-2")], 3)
    assert said == [f"a learner died: killed; restart {i} of 3 (cluster.max_restarts)" for i in (1, 2)]


def test_not_more_often_than_allowed() -> None:
    for limit in (0, 1):
        with pytest.raises(LearnerLost):
            runs(limit + 1, limit)
