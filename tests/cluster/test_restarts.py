"""A run that loses a learner restarts, a limited number of times."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from covey.cluster.learner import with_restarts
from covey.errors import LearnerLost


@dataclass
class Attempt:
    path: Path


def runs(losses: int, limit: int) -> tuple[list[Path | None], list[str], int]:
    """Folders that runs were made from, the notes, and the number of the run that completed."""
    folders: list[Path | None] = []
    notes: list[str] = []

    def make(folder: Path | None) -> Attempt:
        folders.append(folder)
        return Attempt(Path(f"run-{len(folders)}"))

    def run_steps(run: Attempt) -> None:
        if len(folders) <= losses:
            raise LearnerLost("a learner died: killed\n  more")

    found = with_restarts(make, run_steps, limit=limit, note=notes.append)
    return folders, notes, int(found.path.name.removeprefix("run-"))


def test_a_restart_continues_in_the_folder_of_the_previous_attempt() -> None:
    assert runs(0, 3) == ([None], [], 1)
    folders, notes, number = runs(2, 3)
    assert (folders, number) == ([None, Path("run-1"), Path("run-2")], 3)
    assert notes == [f"a learner died: killed\n  more\nrestart {i} of 3 (cluster.max_restarts)" for i in (1, 2)]


def test_a_learner_that_dies_while_a_run_is_made_again_is_a_loss_too() -> None:
    folders: list[Path | None] = []

    def make(folder: Path | None) -> Attempt:
        folders.append(folder)
        if len(folders) in dies_at:
            raise LearnerLost("a learner died: killed")
        return Attempt(Path(f"run-{len(folders)}"))

    def run_steps(run: Attempt) -> None:
        if run.path.name == "run-1":
            raise LearnerLost("a learner died: killed")

    dies_at = {2}
    assert with_restarts(make, run_steps, limit=2, note=print).path == Path("run-3")
    assert folders == [None, Path("run-1"), Path("run-1")]
    folders.clear()
    dies_at = {1}  # before there is a folder
    with_restarts(make, lambda run: None, limit=2, note=print)
    assert folders == [None, None]
    folders.clear()
    dies_at = {1, 2, 3}
    with pytest.raises(LearnerLost):
        with_restarts(make, run_steps, limit=2, note=print)
    assert len(folders) == 3


def test_not_more_often_than_allowed() -> None:
    for limit in (0, 1):
        with pytest.raises(LearnerLost):
            runs(limit + 1, limit)


class Lost:
    """In place of a learner's update."""

    def __call__(self, *given: object) -> None:
        raise LearnerLost("a learner died: killed")


def made(model: Path, folder: Path) -> Any:
    from covey.app import build
    from covey.app.compose import compose_command
    from covey.app.prepare import prepare
    from covey.cli.parse import parse

    settings = [
        "data=sort",
        "data.train_size=4",
        "data.train_batch_size=2",
        "rollout.max_tokens=4",
        "eval.before=false",
    ]
    words = parse([f"model={model}", *settings, "loop.total_steps=2"], switches=(), values=())
    return build.build(prepare(compose_command(words), folder=folder), note=print)


@pytest.mark.parametrize(("left", "message", "status"), [(1, "restarting", "running"), (0, "failed", "failed")])
def test_a_run_that_is_restarted_does_not_read_as_ended(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], left: int, message: str, status: str
) -> None:
    """Until it turns out that it cannot be built again."""
    from covey.app.train import _set_final_status

    run = made(tiny_model_folder, tmp_path / "run")
    run.restarts_left = left
    run.learner.update = Lost()
    with pytest.raises(LearnerLost):
        asyncio.run(run.train())
    assert f"{message} after 0 of 2 steps" in capsys.readouterr().out
    assert json.loads((run.path / "run.json").read_text())["status"] == status
    _set_final_status(run.path, "failed")
    assert json.loads((run.path / "run.json").read_text())["status"] == "failed"


def test_a_restart_without_a_checkpoint_begins_again_in_the_same_folder(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from covey.app import train as command
    from covey.app.compose import compose_command
    from covey.app.prepare import prepare
    from covey.cli.parse import parse

    monkeypatch.chdir(tmp_path)
    folders: list[Path] = []
    settings = ["data=sort", "data.train_size=4", "rollout.max_tokens=4", "resume=disable", "logging.to=[]"]
    prepared = prepare(compose_command(parse([f"model={tiny_model_folder}", *settings], switches=(), values=())))

    def ends(run: Any) -> None:
        folders.append(run.path)
        run.resources.close()
        run.folder.release()
        if len(folders) == 1:
            raise LearnerLost("a learner died: killed")

    command._run_with_restarts(prepared, ends, note=lambda text: print(text))
    assert len(folders) == 2 and folders[0] == folders[1]
    output = capsys.readouterr().out
    assert "restart 1 of 3" in output and "from the beginning: there is no checkpoint yet (loop.save_every)" in output


def test_a_run_that_could_not_be_made_leaves_its_folder_free(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from covey.app import build
    from covey.app.compose import compose_command
    from covey.app.prepare import prepare
    from covey.cli.parse import parse

    def lost(*given: object) -> None:
        raise LearnerLost("a learner died: killed")

    monkeypatch.setattr(build, "_learner_and_engine", lost)
    words = parse(
        [f"model={tiny_model_folder}", "data=sort", "data.train_size=4", "logging.to=[]"], switches=(), values=()
    )
    prepared = prepare(compose_command(words), folder=tmp_path / "run")
    caught = []
    for _ in range(2):  # the second attempt finds no lock of the first, whose frames are still alive
        with pytest.raises(LearnerLost, match="a learner died") as error:
            build.build(prepared, note=print)
        caught.append(error)
        assert not (tmp_path / "run").exists()
