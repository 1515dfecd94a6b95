"""Following run folders: columns, thinning, the episode index, truncated and incomplete files."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from covey.dashboard.episodes import EpisodeIndex, Query
from covey.dashboard.metrics import Metrics, Tail, constant_level, thin
from covey.dashboard.runs import Library, Run, run_folders
from covey.errors import InputError
from covey.evaluation.statistics import wilson
from covey.telemetry.history import SUMMARY_FILE, read_run, write_labels, write_totals
from covey.telemetry.jsonl import PART_BYTES
from tests.dashboard.synthetic import episode, healthy, write_episodes, write_run


def line(kind: str, step: int, **metrics: float | None) -> str:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return json.dumps({"kind": kind, "step": step, "metrics": named}) + "\n"


# -- following a file --------------------------------------------------------------------------------------------------


def test_a_line_is_read_once_and_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tail = Tail(path)
    assert list(tail.lines()) == []
    path.write_text("one\ntw")
    assert list(tail.lines()) == [(0, b"one\n")]
    with path.open("a") as file:
        file.write("o\n")
    assert list(tail.lines()) == [(4, b"two\n")]
    assert not tail.was_cut()


def test_truncation_is_noticed_even_if_the_file_has_grown_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("one\ntwo\n")
    tail = Tail(path)
    list(tail.lines())
    path.write_text("one\nTWO\nthree\n")
    assert tail.was_cut()
    assert [text for _, text in tail.lines()] == [b"one\n", b"TWO\n", b"three\n"]
    path.write_text("one\n")
    assert tail.was_cut()
    assert [text for _, text in tail.lines()] == [b"one\n"]


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_missing_values_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line("step", 0, a=1.0) + line("step", 1, b=2.0) + line("step", 2, a=None))
    metrics = Metrics(tmp_path)
    assert metrics.poll() and not metrics.poll()
    table = metrics.tables["step"]
    assert table.names() == ["a", "b"] and len(table) == 3
    np.testing.assert_array_equal(table.column("a"), [1.0, math.nan, math.nan])
    np.testing.assert_array_equal(table.column("b"), [math.nan, 2.0, math.nan])
    steps, values = table.points("b")
    assert (steps.tolist(), values.tolist()) == ([1], [2.0])


def test_truncated_steps_of_a_resumed_run_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line("step", 0, a=1.0) + line("step", 1, a=2.0))
    metrics = Metrics(tmp_path)
    metrics.poll()
    path.write_text(line("step", 0, a=1.0))
    assert metrics.poll() and len(metrics.tables["step"]) == 1
    with path.open("a") as file:
        file.write(line("step", 1, a=7.0))
    metrics.poll()
    assert metrics.tables["step"].column("a").tolist() == [1.0, 7.0]


def test_time_and_tokens_are_cumulative(tmp_path: Path) -> None:
    """An evaluation of 2 s, two steps of 5 s and 100 tokens, another evaluation."""
    (tmp_path / "metrics.jsonl").write_text(
        line("eval", 0, timing__evaluate=2.0)
        + line("step", 0, timing__step=5.0, perf__generated_tokens=100.0)
        + line("step", 1, timing__step=5.0, perf__generated_tokens=100.0)
        + line("eval", 2, timing__evaluate=3.0)
    )
    metrics = Metrics(tmp_path)
    metrics.poll()
    steps, evals = metrics.axes("step"), metrics.axes("eval")
    assert steps["time"].tolist() == [2.0, 7.0] and steps["tokens"].tolist() == [0.0, 100.0]
    assert evals["time"].tolist() == [2.0, 15.0] and evals["tokens"].tolist() == [0.0, 200.0]


def test_a_spike_survives_the_thinning() -> None:
    values = np.zeros(10_000)
    values[4321] = 9.0
    values[5000:5010] = np.nan
    found = thin({"a": values}, {"step": np.arange(10_000.0)}, points=1000)
    series = found["series"]["a"]
    assert found["rows"] == 10_000 and len(series["y"]) == 1000
    assert (series["hi"][432], series["y"][432], series["lo"][432]) == (9.0, 0.9, 0.0)
    assert series["y"][500] is None and series["hi"][500] is None


def test_a_short_series_is_left_as_it_is() -> None:
    found = thin({"a": np.array([1.0, math.nan])}, {"step": np.arange(2.0)})
    assert found["series"] == {"a": {"y": [1.0, None]}} and found["axes"] == {"step": [0.0, 1.0]}


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("policy/ess", [1.0, 1.0 - 1e-7, 1.0 + 5e-8, math.nan], 1.0),
        ("perf/memory_gib", [12.3456789, 12.3456780], 12.3457),
        ("gvpo/mean_weight", [0.0, 1.86e-9, -3e-9], 0.0),
        ("reward/mean", [0.5, 0.5], None),  # constant: there is nothing to hide
        ("reward/mean", [0.5, 0.5001], None),
        ("policy/kl_old", [0.0, 1e-5, -1e-5], None),
        ("optim/lr", [1e-8, 2e-8], None),
        ("reward/mean", [math.nan], None),
    ],
)
def test_round_off_is_a_constant_level(name: str, values: list[float], expected: float | None) -> None:
    assert constant_level(name, np.array(values)) == expected


def test_the_interval_of_a_share() -> None:
    """Wilson's interval of 8 of 10, as tables have it: 0.490 to 0.943."""
    low, high = wilson(0.8, 10)
    assert low == pytest.approx(0.4902, abs=1e-4) and high == pytest.approx(0.9433, abs=1e-4)
    assert wilson(0.0, 10)[0] == 0.0 and wilson(1.0, 10)[1] == 1.0


# -- episodes ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[PART_BYTES, 3000, 1], ids=["one file", "parts", "a part each"])
def indexed(tmp_path: Path, request: pytest.FixtureRequest) -> EpisodeIndex:
    odd = {"rows": [1, 2], "more": {"x": 1, "rows": [3]}}  # an answer with our own word for the token rows in it
    wrong = [{"tool": "calculator", "error": "malformed"}, {"tool": "calculator", "error": None}]
    made = [episode(step, attempt, reward=float(attempt)) for step in range(8) for attempt in range(2)]
    made += [
        episode(8, 0, tokens=40, reward=None, stop=None, failure={"cause": "timeout", "message": "500 s"}),
        episode(8, 1, tokens=30, answer=odd, tools=wrong, stop="length"),
        episode(9, 0, messages=[{"role": "user", "content": 'say ", "rows": [ please'}], task_id="Odd"),
    ]
    write_episodes(tmp_path, made, request.param)
    episodes = EpisodeIndex(tmp_path)
    while episodes.poll(limit=2000):
        pass
    assert episodes.indexed == 1.0
    return episodes


def test_lengths_are_the_sampled_tokens(indexed: EpisodeIndex) -> None:
    """Of every six tokens the last is given: 10 of 12 are sampled, 34 of 40, 25 of 30."""
    assert indexed.column("length").tolist() == [10.0] * 16 + [34.0, 25.0, 10.0]
    assert indexed.read(17)["rows"][0]["text"] == episode(8, 1, tokens=30)["rows"][0]["text"]


def test_each_filter_by_itself(indexed: EpisodeIndex) -> None:
    def found(**asked: object) -> list[int]:
        return indexed.find(Query(descending=False, **asked)).tolist()  # type: ignore[arg-type]

    assert len(found()) == 19
    assert found(min_reward=1.0, last_step=1) == [1, 3]
    assert found(max_reward=0.0, last_step=1) == [0, 2]
    assert found(min_length=26) == [16] and found(min_length=25, max_length=26) == [17]
    assert found(tool_errors=True) == [17] and found(failed=True) == [16]
    assert found(stop="length") == [17] and found(stop="none") == [16] and found(stop="unheard of") == []
    assert found(task="odd") == [18] and found(task="question 3", first_step=3, last_step=3) == [6, 7]
    assert found(text='", "rows": [ please') == [18] and found(text="never said") == []
    assert found(text="é", last_step=0) == [0, 1]


def test_unscored_episodes_come_last_in_either_order(indexed: EpisodeIndex) -> None:
    for descending in (True, False):
        places = indexed.find(Query(sort="reward", descending=descending)).tolist()
        assert places[-1] == 16
    assert indexed.find(Query(sort="length")).tolist()[:2] == [16, 17]


def test_the_group_and_the_task_of_an_episode(indexed: EpisodeIndex) -> None:
    assert indexed.related(0, group=True) == [0, 1]
    assert indexed.related(0, group=False) == [0, 1, 14, 15]  # steps 0 and 7 have the same task


def test_rewards_that_appear_later_are_missing_before(tmp_path: Path) -> None:
    write_episodes(tmp_path, [episode(0, 0), episode(1, 0, rewards={"style": 0.5, "exact": 1.0})])
    episodes = EpisodeIndex(tmp_path)
    episodes.poll()
    np.testing.assert_array_equal(episodes.column("reward:style"), [math.nan, 0.5])
    np.testing.assert_array_equal(episodes.column("reward:exact"), [1.0, 1.0])


def test_an_index_starts_again_after_truncation(tmp_path: Path) -> None:
    write_episodes(tmp_path, [episode(0, 0), episode(1, 0)])
    episodes = EpisodeIndex(tmp_path)
    episodes.poll()
    write_episodes(tmp_path, [episode(0, 0)])
    episodes.poll()
    assert len(episodes) == 1 and episodes.indexed == 1.0


def test_an_index_follows_into_new_parts_and_back(tmp_path: Path) -> None:
    """A resumed run that truncates two parts and continues differently."""
    made = [episode(step, 0) for step in range(5)]
    two = 3 * len(json.dumps(made[0])) // 2  # a part takes two episodes
    write_episodes(tmp_path, made[:2], part_bytes=two)
    episodes = EpisodeIndex(tmp_path)
    episodes.poll()
    assert len(episodes) == 2
    write_episodes(tmp_path, made, part_bytes=two)
    episodes.poll()
    assert len(list(tmp_path.iterdir())) == 3 and episodes.column("step").tolist() == [0, 1, 2, 3, 4]
    assert episodes.read(4)["step"] == 4
    write_episodes(tmp_path, [made[0], episode(7, 0)], part_bytes=two)
    episodes.poll()
    assert len(list(tmp_path.iterdir())) == 1 and episodes.column("step").tolist() == [0, 7]


# -- runs --------------------------------------------------------------------------------------------------------------


def test_the_state_of_a_run(tmp_path: Path) -> None:
    series, _ = healthy(20)
    folder = write_run(tmp_path / "a", series, {0: 0.2, 10: 0.7, 20: 0.6}, status="running", total=30)
    run = Run(0, folder, "a")
    run.poll()
    state = run.state()
    assert (state["done"], state["total"], state["status"]) == (20, 30, "running")
    assert state["eta"] == pytest.approx(10 * 5.0)  # ten steps of 5 s are left
    assert state["seconds"] == pytest.approx(20 * 5.0 + 3 * 2.0)
    assert (state["best"]["step"], state["best"]["value"]) == (10, 0.7)
    assert state["last"]["value"] == 0.6 and state["last"]["low"] < 0.6 < state["last"]["high"]
    run.open()
    assert run.stages() == {"rollout": 60.0, "update": 30.0, "publish": 10.0, "evaluate": 6.0}
    assert state["silent"] is None


def test_a_finished_run_is_listed_without_reading_its_metrics(tmp_path: Path) -> None:
    """metrics.jsonl is replaced by the same number of meaningless bytes: reading it would find no steps."""
    folder = write_run(tmp_path / "a", healthy(20)[0], {0: 0.2, 10: 0.7, 20: 0.6})
    write_totals(folder, read_run(folder))
    path = folder / "metrics.jsonl"
    before = path.stat()
    path.write_bytes(b"x" * (before.st_size - 1) + b"\n")
    later = Run(0, folder, "a")
    later.poll()
    assert later.state()["done"] == 0, "written after the summary: it is read"
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    library = Library([tmp_path])
    library.poll()
    state = library.runs[0].state()
    assert (state["done"], state["seconds"], state["best"]["value"], state["last"]["value"]) == (20, 106.0, 0.7, 0.6)
    with path.open("a") as file:  # a resumed run goes on: the new steps are added
        file.write(line("step", 20, timing__step=4.0))
    library.poll()
    assert (library.runs[0].state()["done"], library.runs[0].state()["seconds"]) == (21, 110.0)
    path.write_text(line("step", 0, timing__step=3.0))  # from an earlier checkpoint: it begins anew
    library.poll()
    assert (library.runs[0].state()["done"], library.runs[0].state()["seconds"]) == (1, 3.0)


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"size": 1}', '{"evaluations": [[1]]}', "[" * 100_000])
def test_an_invalid_summary_is_ignored(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path / "a", healthy(20)[0], {0: 0.2, 10: 0.7, 20: 0.6})
    (folder / SUMMARY_FILE).write_text(text)
    run = Run(0, folder, "a")
    run.poll()
    assert run.state()["done"] == 20 and run.state()["best"]["value"] == 0.7


def test_totals_are_those_of_the_whole_record(tmp_path: Path) -> None:
    """Counted without parsing, and by the tables behind the charts."""
    folder = write_run(tmp_path / "a", *healthy(60))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"step","step":60,"metrics":{"timing/step":7.0}}\n')  # written by another program
        file.write(line("step", 61, timing__step=None) + line("eval", 62, eval__accuracy=None) + "no record\n")
        file.write('{"kind": "step", "step": 62, "metsics": {"timing/step": 5.0}}\n')
    run = Run(0, folder, "a")
    run.poll()
    run.open()
    steps, evals = run.metrics.tables["step"], run.metrics.tables["eval"]
    assert run.totals.steps == len(steps) == 62 and run.totals.broken == run.metrics.broken == 2
    seconds = steps.points("timing/step")[1].sum() + evals.points("timing/evaluate")[1].sum()
    assert run.totals.seconds == pytest.approx(seconds)
    assert run.totals.pace == 5.0 and len(run.totals.recent) == 20
    at, values = evals.points("eval/accuracy")
    assert run.totals.evaluations == list(zip(at.tolist(), values.tolist(), strict=True))


def test_metrics_are_read_when_a_run_is_opened_and_followed_from_then_on(tmp_path: Path) -> None:
    series, _ = healthy(20)
    folder = write_run(tmp_path / "a", {name: values[:10] for name, values in series.items()}, {}, status="running")
    run = Run(0, folder, "a")
    run.poll()
    assert run.state()["done"] == 10 and len(run.metrics.tables["step"]) == 0
    run.open()
    assert len(run.metrics.tables["step"]) == 10
    before = run.version
    write_run(folder, series, {}, status="running")
    assert run.poll() and run.version != before and len(run.metrics.tables["step"]) == 20


def test_labels_that_change_are_seen(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", *healthy(10), tags=["old"])
    run = Run(0, folder, "a")
    run.poll()
    before = run.version
    write_labels(folder, ["new"], "words")
    assert run.poll() and run.version != before
    assert (run.state()["tags"], run.state()["notes"]) == (["new"], "words")


def test_a_reward_beyond_one_is_not_an_accuracy_and_has_no_interval(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", healthy(20)[0], {0: 1.125, 20: 0.6})
    run = Run(0, folder, "a")
    run.poll()
    state = run.state()
    assert state["curve"]["measure"] == "reward"
    assert state["best"] == {"step": 0, "value": 1.125} and state["last"] == {"step": 20, "value": 0.6}


def test_a_running_run_without_output_is_silent(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", *healthy(20), status="running", total=30)
    for file in folder.iterdir():
        os.utime(file, (1e9, 1e9))
    run = Run(0, folder, "a")
    run.poll()
    assert run.state()["silent"] > 1e6


def test_runs_are_found_by_their_start_and_new_ones_get_new_numbers(tmp_path: Path) -> None:
    write_run(tmp_path / "x" / "late", *healthy(10), started="2026-02-01T00:00:00")
    write_run(tmp_path / "y" / "early", *healthy(10), started="2026-01-01T00:00:00")
    write_run(tmp_path / ".hidden" / "run", *healthy(10))
    library = Library([tmp_path])
    assert [run.name for run in library.runs] == ["y/early", "x/late"]
    write_run(tmp_path / "z" / "between", *healthy(10), started="2026-01-15T00:00:00")
    library._searched = None
    library.poll()
    assert [(run.number, run.name) for run in library.runs] == [(0, "y/early"), (1, "x/late"), (2, "z/between")]
    assert run_folders([tmp_path / "x" / "late"]) == [tmp_path / "x" / "late"]


def test_without_runs_the_error_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run found"):
        Library([tmp_path])
    with pytest.raises(InputError, match="no such folder"):
        Library([tmp_path / "none"])


def test_a_run_that_is_deleted_stays_as_it_was_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, *healthy(10))
    library = Library([tmp_path / "a", tmp_path / "b"])
    library.poll()
    seen = library.runs[0].state()["done"]
    shutil.rmtree(tmp_path / "a")
    library._searched = None  # look at once
    for _ in range(2):
        library.poll()
    assert library.runs[0].deleted and not library.runs[1].deleted
    assert library.runs[0].state()["done"] == seen
