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


def test_a_learner_that_dies_while_a_run_is_made_again_is_a_loss_too() -> None:
    asked: list[Path | None] = []

    def make(folder: Path | None) -> Attempt:
        asked.append(folder)
        if len(asked) in dies_at:
            raise LearnerLost("a learner died: killed")
        return Attempt(Path(f"run-{len(asked)}"))

    def complete(run: Attempt) -> None:
        if run.path.name == "run-1":
            raise LearnerLost("a learner died: killed")

    dies_at = {2}
    assert with_restarts(make, complete, limit=2, note=print).path == Path("run-3")
    assert asked == [None, Path("run-1"), Path("run-1")]
    asked.clear()
    dies_at = {1}
    with pytest.raises(LearnerLost):  # what cannot start is told at once
        with_restarts(make, complete, limit=2, note=print)
    assert asked == [None]


def test_not_more_often_than_allowed() -> None:
    for limit in (0, 1):
        with pytest.raises(LearnerLost):
            runs(limit + 1, limit)


def test_a_run_that_could_not_be_made_leaves_its_folder_free(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from covey.cli import build
    from covey.cli.prepare import prepare
    from covey.cli.words import compose_words, parse
    from covey.loop.folder import lock_folder

    def lost(*given: object) -> None:
        raise LearnerLost("a learner died: killed")

    monkeypatch.setattr(build, "_learner_and_engine", lost)
    words = parse(
        [f"model={tiny_model_folder}", "data=sort", "data.train_size=4", "logging.to=[]"], switches=(), values=()
    )
    prepared = prepare(compose_words(words), folder=tmp_path / "run")
    with pytest.raises(LearnerLost) as caught:
        build.build(prepared, note=print)
    lock_folder(tmp_path / "run").close()
    del caught  # with the frames that had the folder
