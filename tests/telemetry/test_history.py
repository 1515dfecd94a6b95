"""Tags and notes: what a run starts with, what is changed later, and what a resumed run keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from covey.cli.main import main
from covey.config.schema import LoggingConfig
from covey.errors import InputError
from covey.storage import LOCK
from covey.telemetry.history import LABELS_FILE, read_run, relabel
from tests.dashboard.synthetic import healthy, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "a", *healthy(4), tags=["baseline", "long"], notes="first")


def labels(folder: Path) -> tuple[list[str], str]:
    run = read_run(folder)
    return run["tags"], run["notes"]


def test_labels_are_added_removed_and_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "tag", str(folder), "best", "lr=1e-5", "best", "--remove", "long"]) == 0
    assert labels(folder) == (["baseline", "best", "lr=1e-5"], "first")
    assert "baseline, best, lr=1e-5" in capsys.readouterr().out
    assert main(["runs", "tag", str(folder), "--notes", "second try"]) == 0
    assert labels(folder) == (["baseline", "best", "lr=1e-5"], "second try")
    assert json.loads((folder / "run.json").read_text())["tags"] == ["baseline", "long"], "the run's own file stays"


def test_a_live_run_keeps_its_status_and_its_labels(folder: Path) -> None:
    """Its process may write run.json at any moment: labels are another file."""
    (folder / LOCK).touch()
    before = (folder / "run.json").read_bytes()
    assert main(["runs", "tag", str(folder), "best"]) == 0
    assert (folder / "run.json").read_bytes() == before
    (folder / "run.json").write_text(json.dumps(json.loads(before) | {"status": "failed"}))
    assert (read_run(folder)["status"], labels(folder)[0]) == ("failed", ["baseline", "long", "best"])


@pytest.mark.parametrize("words", [["--remove", "absent"], ["two\nlines"], ["x" * 65], [" "]])
def test_an_invalid_tag_is_refused_and_nothing_is_written(folder: Path, words: list[str]) -> None:
    assert main(["runs", "tag", str(folder), *words]) == 2
    assert not (folder / LABELS_FILE).exists()
    assert main(["runs", "tag", str(folder / "none"), "a"]) == 2 and main(["runs", "tag"]) == 2


def test_an_invalid_tag_in_the_settings_is_refused() -> None:
    with pytest.raises(InputError, match=r"logging\.tags: '' is not a tag"):
        LoggingConfig(tags=["fine", ""])


@pytest.mark.parametrize(
    ("written", "tags"),
    [
        ("[]", ["baseline", "long"]),
        ("{", ["baseline", "long"]),
        ('{"tags": ["\\ud800"]}', ["baseline", "long"]),
        ('{"tags": "word", "notes": 3}', []),
        ('{"tags": [1, "a"]}', ["a"]),
    ],
)
def test_a_damaged_labels_file_does_not_hide_a_run(folder: Path, written: str, tags: list[str]) -> None:
    (folder / LABELS_FILE).write_text(written)
    assert labels(folder)[0] == tags


def test_a_symlinked_labels_file_is_ignored(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"tags": ["secret"]}')
    (folder / LABELS_FILE).symlink_to(tmp_path / "secret.json")
    assert labels(folder) == (["baseline", "long"], "first")


def test_a_resumed_run_keeps_later_labels_unless_its_command_changes_them(folder: Path) -> None:
    began = {"logging": {"tags": ["baseline", "long"], "notes": "first"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(began))
    main(["runs", "tag", str(folder), "best"])
    relabel(folder, LoggingConfig(tags=["baseline", "long"], notes="first"))
    assert labels(folder) == (["baseline", "long", "best"], "first")
    relabel(folder, LoggingConfig(tags=["baseline"], notes="longer"))
    assert labels(folder) == (["baseline"], "longer")


def test_a_run_without_label_fields_has_no_labels(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", *healthy(4))
    relabel(folder, LoggingConfig())
    assert labels(folder) == ([], "") and not (folder / LABELS_FILE).exists()
