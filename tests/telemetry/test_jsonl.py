"""metrics.jsonl and episodes.jsonl: records, parts, and truncation on resume."""

from __future__ import annotations

import json
import math
import mmap
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.errors import InputError
from covey.memory import memory_metrics
from covey.telemetry import Telemetry, TokenRow, episode_record, read_episodes, read_history
from covey.telemetry.jsonl import PART_BYTES, JsonlFiles, parts_of, read_jsonl
from covey.telemetry.key_metrics import is_machine_dependent
from covey.types import Episode, Failure, Sample, StopReason, Task


def test_one_line_per_record_with_sorted_names_and_full_precision(tmp_path: Path) -> None:
    telemetry = Telemetry(JsonlFiles(tmp_path))
    telemetry.evaluation(0, {"eval/accuracy": 0.1 + 0.2}, None)
    telemetry.step(0, {"reward/mean": 1 / 3, "grad/norm": 2.0}, None, [{"schema": 1, "step": 0}])
    telemetry.close("finished")

    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [
        '{"kind": "eval", "step": 0, "metrics": {"eval/accuracy": 0.30000000000000004}}',
        '{"kind": "step", "step": 0, "metrics": {"grad/norm": 2.0, "reward/mean": 0.3333333333333333}}',
    ]
    assert (tmp_path / "episodes.jsonl").read_text() == '{"schema": 1, "step": 0}\n'


def test_non_finite_values_are_null_in_both_files_and_absent_when_read(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("part_bytes", [PART_BYTES, 100, 1])
@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_resume_from_offsets_ends_with_the_same_bytes_as_an_uninterrupted_run(
    tmp_path: Path, kept: int, part_bytes: int
) -> None:
    """Killed after four of six steps in the middle of both lines, and resumed from where `kept` were done."""

    def play(telemetry: Telemetry, steps: range) -> None:
        for index in steps:
            episodes = [{"schema": 1, "step": index, "attempt": attempt, "text": "é"} for attempt in range(2)]
            telemetry.step(index, {"reward/mean": index / 7}, None, episodes)

    whole = Telemetry(JsonlFiles(tmp_path / "whole", part_bytes=part_bytes))
    play(whole, range(6))
    whole.close("finished")

    killed = Telemetry(JsonlFiles(tmp_path / "killed", part_bytes=part_bytes))
    play(killed, range(kept))
    offsets = killed.offsets()
    play(killed, range(kept, 4))  # beyond the checkpoint: lost
    killed.close("failed")
    for torn in (tmp_path / "killed" / "metrics.jsonl", parts_of(tmp_path / "killed" / "episodes.jsonl")[-1]):
        with torn.open("a") as file:
            file.write('{"kind": "st')

    resumed = Telemetry(JsonlFiles(tmp_path / "killed", *offsets, part_bytes))
    play(resumed, range(kept, 6))
    resumed.close("finished")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert [(e["step"], e["attempt"]) for e in read_episodes(tmp_path / "killed" / "episodes.jsonl")] == [
        (step, attempt) for step in range(6) for attempt in range(2)
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


WRITES_UNTIL_KILLED = """
import pathlib, sys
from covey.telemetry.jsonl import JsonlFiles
files, step = JsonlFiles(pathlib.Path(sys.argv[1]), part_bytes=100_000), 0
while True:
    files.step(step, {"a": step}, None, [{"schema": 1, "step": step, "text": "x" * 10_000}])
    step += 1
    if step == 5:
        print(*files.offsets(), flush=True)
"""


def test_whole_lines_survive_a_kill(tmp_path: Path) -> None:
    """SIGKILL at any moment: what was written reads without a gap, and a resumed run goes on after its checkpoint."""
    writer = subprocess.Popen([sys.executable, "-c", WRITES_UNTIL_KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    offsets = [int(number) for number in writer.stdout.readline().split()]
    while len(parts_of(tmp_path / "episodes.jsonl")) < 3:
        time.sleep(0.005)
    writer.kill()
    writer.communicate()

    steps = [record.step for record in read_history(tmp_path).steps]
    recorded = [episode["step"] for episode in read_episodes(tmp_path / "episodes.jsonl")]
    assert steps == list(range(len(steps))) and recorded == list(range(len(recorded)))
    assert len(recorded) - len(steps) in (0, 1) and len(steps) > 20  # an episode is written before its step's numbers
    resumed = JsonlFiles(tmp_path, *offsets, part_bytes=100_000)
    resumed.step(5, {"a": 5.0}, None, [{"schema": 1, "step": 5}])
    resumed.close("finished")
    assert [record.step for record in read_history(tmp_path).steps] == [0, 1, 2, 3, 4, 5]
    assert [episode["step"] for episode in read_episodes(tmp_path / "episodes.jsonl")] == [0, 1, 2, 3, 4, 5]


def test_a_full_part_is_followed_by_another(tmp_path: Path) -> None:
    """Lines of 28 bytes: a part takes lines until it has 50."""
    files = JsonlFiles(tmp_path, part_bytes=50)
    files.step(0, {"a": 1.0}, None, [{"schema": 1, "attempt": n} for n in range(5)])
    sizes = {path.name: path.stat().st_size for path in parts_of(tmp_path / "episodes.jsonl")}
    assert sizes == {"episodes.jsonl": 56, "episodes-0001.jsonl": 56, "episodes-0002.jsonl": 28}
    assert files.offsets()[1] == 5 * 28
    files.close("finished")


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
    for name in ("episodes.jsonl", "episodes-0001.jsonl"):
        (tmp_path / name).write_text("old\n")
    assert JsonlFiles(tmp_path).offsets() == (0, 0)
    assert contents(tmp_path) == {"metrics.jsonl": b"", "episodes.jsonl": b""}


def test_a_file_shorter_than_in_the_checkpoint_is_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
    with pytest.raises(InputError, match=r"episodes\.jsonl: 0 bytes, but the checkpoint was written when it had 9"):
        JsonlFiles(tmp_path, 3, 9)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n{}\n"


def test_reading_skips_an_incomplete_last_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    assert list(read_jsonl(path)) == [{"a": 1}]


def test_an_error_names_file_and_line_of_invalid_json(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\noops\n{"a": 2}\n')
    with pytest.raises(InputError, match=r"x\.jsonl, line 2: not JSON"):
        list(read_jsonl(path))


def test_an_error_names_a_folder_that_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is .* the folder of a run"):
        read_history(tmp_path)


def test_a_step_records_the_memory_of_the_process() -> None:
    """64 MiB that are filled show, if they are new to the process: what is freed may be kept."""
    before = memory_metrics()
    with mmap.mmap(-1, 64 * 2**20) as table:
        table.write(b"x" * len(table))
        after = memory_metrics()
    assert set(before) >= {"perf/memory_gib"} or not Path("/proc/self/statm").exists()
    if "perf/memory_gib" in before:
        assert 0.05 < after["perf/memory_gib"] - before["perf/memory_gib"] < 0.5
    assert all(is_machine_dependent(name) for name in after)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_reading_a_gpus_peak_memory_resets_it() -> None:
    memory_metrics()
    del_me = torch.ones(2**28, device="cuda")
    del del_me
    assert memory_metrics()["perf/gpu_memory_gib"] >= 1
    assert memory_metrics()["perf/gpu_memory_gib"] < 1


# -- Episode records ---------------------------------------------------------------------------------------------------

# A vocabulary of bytes: "é" is two tokens, neither of which is a character.
E_ACUTE = tuple("é".encode())


def decode(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def sample() -> Sample:
    return Sample(
        prompt_ids=(ord("2"), ord("?")),
        response_ids=(ord("a"), *E_ACUTE),
        mask=(True, True, False),
        logprobs=(-0.5, -0.25, 0.0),
        versions=(3, 3, 3),
        episode=0,
    )


def episode(**changes: Any) -> Episode:
    question = {"role": "user", "content": "2?"}
    reply = {"role": "assistant", "content": "aé"}
    whole = Episode(Task("t1", (question,), answer=7), (), (question, reply), {"exact": 0.0}, StopReason.EOS)
    return replace(whole, **changes)


def record(**changes: Any) -> dict[str, Any]:
    row = TokenRow(sample(), advantage=[0.5, 0.5, 0.0], ratio=[1.0, 1.5, 0.0], entropy=[0.1, 0.2, 0.0])
    fields = {
        "step": 4,
        "task_id": "t1",
        "group": 1,
        "attempt": 2,
        "episode": episode(),
        "rewards": {"exact": 0.0, "style": None},
        "total_reward": 0.0,
        "advantage": 0.5,
        "tokens": [row],
        "decode": decode,
    }
    return episode_record(**(fields | changes))


def test_the_schema_field_by_field() -> None:
    assert record() == {
        "schema": 1,
        "step": 4,
        "task_id": "t1",
        "group": 1,
        "attempt": 2,
        "messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "aé"}],
        "answer": 7,
        "rewards": {"exact": 0.0, "style": None},
        "total_reward": 0.0,
        "advantage": 0.5,
        "stop": "eos",
        "failure": None,
        "tools": [],
        "rows": [
            {
                "prompt_ids": [50, 63],
                "response_ids": [97, 195, 169],
                "mask": [1, 1, 0],
                "text": ["a", "\ufffd", "\ufffd"],
                "prompt_text": "2?",
                "logprobs": [-0.5, -0.25, 0.0],
                "advantage": [0.5, 0.5, 0.0],
                "ratio": [1.0, 1.5, 0.0],
                "entropy": [0.1, 0.2, 0.0],
                "versions": [3, 3, 3],
            }
        ],
    }


def test_a_failure_keeps_cause_and_message() -> None:
    broken = episode(failure=Failure("timeout", "500 s"), stop=None)
    found = record(episode=broken, total_reward=None, advantage=None, tokens=[])
    assert found["failure"] == {"cause": "timeout", "message": "500 s"}
    assert (found["stop"], found["total_reward"], found["advantage"], found["rows"]) == (None, None, None, [])


@pytest.mark.parametrize("column", ["advantage", "ratio", "entropy"])
def test_lists_of_different_length_fail_an_assertion(column: str) -> None:
    columns = {"advantage": [0.0] * 3, "ratio": [1.0] * 3, "entropy": [0.0] * 3} | {column: [0.0] * 4}
    with pytest.raises(AssertionError, match="3 response tokens"):
        TokenRow(sample(), **columns)


def test_episodes_are_read_back_unchanged(tmp_path: Path) -> None:
    files = JsonlFiles(tmp_path)
    files.step(4, {}, None, [record(), record(attempt=3)])
    files.close("finished")
    assert list(read_episodes(tmp_path / "episodes.jsonl")) == [record(), record(attempt=3)]


def test_answers_of_types_unknown_to_json_are_written_as_text(tmp_path: Path) -> None:
    files = JsonlFiles(tmp_path)
    files.step(0, {}, None, [record(episode=episode(task=Task("t1", (), answer=Path("x"))))])
    files.close("finished")
    [found] = read_episodes(tmp_path / "episodes.jsonl")
    assert found["answer"] == "x"


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text(json.dumps({"schema": 2}) + "\n")
    with pytest.raises(InputError, match="episode schema 2, but this version of covey reads 1"):
        list(read_episodes(path))
