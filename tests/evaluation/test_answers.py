"""The folder of an evaluation: complete tasks are kept, others are sampled again, other settings are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covey.errors import InputError
from covey.evaluation.answers import ANSWERS_FILE, EvalFolder
from covey.evaluation.scores import Answer, EvalSpec

SPEC = EvalSpec("m", "sums", "sampled", 2, "exact")
SETTINGS: dict[str, Any] = {"m on sums": {"eval": {"n": 2, "temperature": 1.0}, "seed": 0}}


def pair(index: int) -> list[Answer]:
    return [Answer("m", "sums", "sampled", index, f"t{index}", attempt, {"exact": 0.1}) for attempt in range(2)]


def opened(path: Path, settings: dict[str, Any] = SETTINGS) -> EvalFolder:
    return EvalFolder(path, settings, "covey eval m")


def test_incomplete_tasks_are_removed(tmp_path: Path) -> None:
    folder = opened(tmp_path / "out")
    for answers in (pair(3), pair(1), pair(0)[:1]):
        folder.append(answers)
    folder.close()
    path = tmp_path / "out" / ANSWERS_FILE
    whole = path.read_text()
    path.write_text(whole + '{"model": "m", "tas')
    folder = opened(tmp_path / "out")
    assert folder.done([SPEC]) == {SPEC.key: {1, 3}}
    assert path.read_text() == "".join(whole.splitlines(keepends=True)[:4])
    folder.append(pair(0))
    assert folder.answers([SPEC])[SPEC.key] == [*pair(0), *pair(1), *pair(3)]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    opened(tmp_path).close()
    other = {"m on sums": {"eval": {"n": 4, "temperature": 1.0}, "seed": 0}}
    with pytest.raises(InputError, match=r"(?s)m on sums · eval · n   there 2, here 4.*covey eval m"):
        opened(tmp_path, other)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InputError, match="has other files and no evaluation"):
        opened(tmp_path)
    with pytest.raises(InputError, match="is a file"):
        opened(tmp_path / "run.json")


def test_one_evaluation_at_a_time(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(InputError, match="still running"):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()
