"""A folder of its own for each test, and a run that takes a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SMALL: dict[str, Any] = {
    "data.train_batch_size": 2,
    "rollout": {"group_size": 4, "max_tokens": 5},
    "loop": {"total_steps": 3, "save_final": False},
    "learner.lr": 1e-3,
    "logging.verbosity": "warning",
    "resume": "disable",
}
ROWS = [{"question": f"say {i}", "answer": "a"} for i in range(4)]


def vowels(final_answer: str) -> float:
    return sum(letter in "aeiou" for letter in final_answer) / 5


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
