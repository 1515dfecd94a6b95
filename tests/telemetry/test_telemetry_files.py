"""metrics.jsonl and episodes.jsonl: what is written, and what a resumed run finds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from covey.errors import InputError
from covey.telemetry import Telemetry, read_episodes, read_history
from covey.telemetry.jsonl import JsonlFiles, read_jsonl


def test_one_line_per_record_with_sorted_names_and_every_digit(tmp_path: Path) -> None:
    telemetry = Telemetry(JsonlFiles(tmp_path))
    telemetry.evaluation(0, {"eval/accuracy": 0.1 + 0.2}, None)
    telemetry.step(0, {"reward/mean": 1 / 3, "grad/norm": 2.0}, None, [{"schema": 1, "step": 0}])
    telemetry.close("finished")

    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [
        '{"kind": "eval", "step": 0, "metrics": {"eval/accuracy": 0.30000000000000004}}',
        '{"kind": "step", "step": 0, "metrics": {"grad/norm": 2.0, "reward/mean": 0.3333333333333333}}',
    ]
    assert (tmp_path / "episodes.jsonl").read_text() == '{"schema": 1, "step": 0}\n'


def test_what_is_not_finite_is_null_in_both_files_and_absent_when_read(tmp_path: Path) -> None:
    telemetry = Telemetry(JsonlFiles(tmp_path))
    metrics = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}
    telemetry.step(0, metrics, None, [{"schema": 1, "rows": [{"ratio": [1.0, math.inf]}], "rewards": {"x": math.nan}}])
    telemetry.close("finished")

    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["metrics"] == {"a": None, "b": None, "c": None, "d": 1.0}
    assert read_history(tmp_path).steps[0].metrics == {"d": 1.0}
    [episode] = read_episodes(tmp_path / "episodes.jsonl")
    assert episode["rows"] == [{"ratio": [1.0, None]}]
    assert episode["rewards"] == {"x": None}


def test_resume_from_offsets_ends_with_the_same_bytes_as_an_uninterrupted_run(tmp_path: Path) -> None:
    def play(telemetry: Telemetry, steps: range) -> None:
        for index in steps:
            telemetry.step(index, {"reward/mean": index / 7}, None, [{"schema": 1, "step": index, "text": "é"}])

    whole = Telemetry(JsonlFiles(tmp_path / "whole"))
    play(whole, range(5))
    whole.close("finished")

    killed = Telemetry(JsonlFiles(tmp_path / "killed"))
    play(killed, range(2))
    metrics_offset, episodes_offset = killed.offsets()
    play(killed, range(2, 4))  # beyond the checkpoint: lost
    killed.close("failed")
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')  # and half a line

    resumed = Telemetry(JsonlFiles(tmp_path / "killed", metrics_offset, episodes_offset))
    play(resumed, range(2, 5))
    resumed.close("finished")
    for name in ("metrics.jsonl", "episodes.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_offsets_are_the_sizes_on_disk_also_right_after_resuming(tmp_path: Path) -> None:
    files = JsonlFiles(tmp_path)
    assert files.offsets() == (0, 0)
    files.step(0, {"a": 1.0}, None, [{"schema": 1}])
    sizes = ((tmp_path / "metrics.jsonl").stat().st_size, (tmp_path / "episodes.jsonl").stat().st_size)
    assert files.offsets() == sizes
    files.close("interrupted")
    assert JsonlFiles(tmp_path, *sizes).offsets() == sizes


def test_a_new_run_starts_empty(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("old\n")
    (tmp_path / "episodes.jsonl").write_text("old\n")
    assert JsonlFiles(tmp_path).offsets() == (0, 0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_file_shorter_than_the_checkpoint_says_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
    with pytest.raises(InputError, match=r"episodes\.jsonl: 0 bytes, but the checkpoint was written when it had 9"):
        JsonlFiles(tmp_path, 3, 9)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n{}\n"


def test_reading_leaves_out_a_line_that_is_still_being_written(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    assert list(read_jsonl(path)) == [{"a": 1}]


def test_reading_names_file_and_line_of_what_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\noops\n{"a": 2}\n')
    with pytest.raises(InputError, match=r"x\.jsonl, line 2: not JSON"):
        list(read_jsonl(path))


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is .* the folder of a run"):
        read_history(tmp_path)
