"""Parting a data set that is one list into what is trained on and what is tested on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.config.schema import DataConfig
from covey.errors import InputError
from covey.tasks import load_tasks


@pytest.fixture
def ten_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"key": i, "prompt": f"Say {i}.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
        for i in range(10)
    ]
    (tmp_path / "input_data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    assert main(["data", "prepare", "ifeval", "--from", str(tmp_path / "input_data.jsonl")]) == 0


def ids(tasks: object) -> list[str]:
    return [task.id.removeprefix("ifeval/") for task in tasks]  # type: ignore[attr-defined]


def test_so_many_are_tested_on_and_the_others_trained_on(ten_prompts: None) -> None:
    assert ids(load_tasks(DataConfig("ifeval"), seed=0).train) == []
    parted = load_tasks(DataConfig("ifeval", {"held_out": 3}), seed=0)
    assert ids(parted.validation) == ["0", "3", "6"]
    assert ids(parted.train) == ["1", "2", "4", "5", "7", "8", "9"]
    assert parted.reward == "ifeval"


@pytest.mark.parametrize("count", [0, 10, "three"])
def test_something_must_be_left_on_both_sides(ten_prompts: None, count: object) -> None:
    with pytest.raises(InputError, match=r"data.options.held_out must be a number from 1 to 9, got"):
        load_tasks(DataConfig("ifeval", {"held_out": count}), seed=0)
