"""Studies: their settings, jobs, schedule, records, statistics and tables."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from covey.cli.main import main as covey
from tests.benchmarks.conftest import BENCHMARKS
from tests.conftest import shared_folder


@dataclass
class Ended:
    code: int
    pid: int = 0

    def poll(self) -> int:
        return self.code


def start_here(job: Any, command: Sequence[str]) -> Ended:
    """The process of a job, in this process and at once."""
    if command[1] != "-m":
        from studies.kl import measure

        run, start, out = map(Path, command[2:])
        out.write_text(json.dumps(measure(run, start)))
        return Ended(0)
    words = [*command[3:]]
    return Ended(covey([*words, "logging.to=[]"] if words[0] != "eval" else words))


def tiny(name: str, out: Path, *words: str) -> int:
    import study

    return study.main([name, "--tiny", "--out", str(out), *words], start=start_here)


def records_of(archive: Path, folder: Path) -> dict[str, dict[str, Any]]:
    from studies.record import read_record, unpack

    return {path.name.removesuffix(".json.gz"): read_record(path) for path in unpack(archive, folder)}


# -- Whole studies -----------------------------------------------------------------------------------------------------

TRIED = {
    "smollm2": ["--seeds", "0", "--only", "grpo", "gvpo-old"],
    "smollm2-rewards": ["--seeds", "0", "1"],
    "gsm8k": ["--seeds", "0", "1", "--only", "grpo", "gvpo-initial"],
    "gsm8k-long": [],
    "gsm8k-1.5b": ["--only", "gvpo-old"],
    "rewards": ["--seeds", "0", "1"],
    "agents": ["--seeds", "0"],
    "staleness": ["--seeds", "0", "--only", "stale-0", "stale-2-uncorrected"],
}


SLOW = ("smollm2-rewards", "gsm8k-long", "gsm8k-1.5b", "rewards", "staleness", "agents")


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in TRIED])
def test_a_study_becomes_a_section_of_the_page(name: str, tmp_path: Path) -> None:
    import publish_studies
    from studies import tiny as small
    from studies.catalogue import chosen

    assert tiny(name, tmp_path / "out", "--export", str(tmp_path / "export"), *TRIED[name]) == 0
    for study in chosen(name):
        found = records_of(tmp_path / f"export/{study.name}.tar", tmp_path / "records" / study.name)
        assert {record["status"] for record in found.values()} == {"finished"}
        for record in found.values():
            assert [one["step"] for one in record["evaluations"]["at"]] == [0, 2, 4]
            assert record["kl"]["per_token"][0] == pytest.approx(0.0, abs=1e-4)
            assert record["settings"]["model"]["name"].startswith("OUT/")
            assert str(tmp_path) not in json.dumps(record)
        page = tmp_path / "page.md"
        page.write_text(f"<!-- study-{study.name}: begin --><!-- study-{study.name}: end -->")
        publish_studies.publish(small.shrunk(study), tmp_path / "records", page, tmp_path / "images")
        text = page.read_text()
        assert "Not run yet" not in text and "after equal updates" in text
        for record in found.values():
            assert f"| {record['experiment']} |" in text
        assert (tmp_path / f"images/study-{study.name}.png").is_file()
    check = CHECKS.get(name)
    if check:
        check(tmp_path, text)


def of_gsm8k(folder: Path, text: str) -> None:
    """The table has the figures of the records; the transfer sets were asked before and after."""
    found = records_of(folder / "export/gsm8k.tar", folder / "again")
    values = [
        record["evaluations"]["at"][-1]["rewards"]["math_equal"] for key, record in found.items() if "grpo" in key
    ]
    row = next(line for line in text.splitlines() if line.startswith("| grpo | 2 |"))
    assert f"**{100 * fmean(map(fmean, values)):.1f} [" in row
    assert "gvpo-initial − grpo | updates" in text and "gvpo-initial − grpo | time" in text
    for record in found.values():
        assert {when: set(sets) for when, sets in record["transfer"].items()} == {
            "before": {"MATH-500", "stories"},
            "after": {"MATH-500", "stories"},
        }
        assert not list((folder / "out/gsm8k").glob("*/train/*/*/checkpoints"))  # deleted once they were evaluated
    # The same command finds nothing to do, and changes no record.
    before = (folder / "export/gsm8k.tar").read_bytes()
    assert tiny("gsm8k", folder / "out", "--export", str(folder / "export"), *TRIED["gsm8k"]) == 0
    assert (folder / "export/gsm8k.tar").read_bytes() == before


def of_rewards(folder: Path, text: str) -> None:
    assert "the worse of the two" in text and "within 6 tokens" in text
    row = next(line for line in text.splitlines() if line.startswith("| dgdo |") and "length" in line)
    assert "math_equal 0." in row and "format 0." in row


def of_staleness(folder: Path, text: str) -> None:
    found = records_of(folder / "export/staleness.tar", folder / "again")
    assert found["stale-0-s0"]["settings"]["mode"]["max_staleness"] == 0
    assert found["stale-2-uncorrected-s0"]["settings"]["algorithm"]["correction"] == "none"
    assert "| stale-0 | 0.00 |" in text


CHECKS = {"gsm8k": of_gsm8k, "rewards": of_rewards, "staleness": of_staleness}


# -- Interruptions -----------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds


class Worker:
    """A process that needs some seconds of a clock; SIGTERM ends it after `slow` more."""

    def __init__(self, clock: Clock, needs: float, code: int = 0, slow: float = 0.0) -> None:
        self.clock, self.ends, self.code, self.slow = clock, clock.now + needs, code, slow
        self.pid, self.signals = 0, list[int]()

    def poll(self) -> int | None:
        return self.code if self.clock.now >= self.ends else None

    def receive(self, number: int) -> None:
        self.signals.append(number)
        self.code = 75 if number == signal.SIGTERM else -9
        self.ends = self.clock.now + (self.slow if number == signal.SIGTERM else 0.0)


@pytest.fixture
def schedule_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a schedule of named jobs; each needs those before it that are listed."""
    from studies import schedule
    from studies.jobs import Job

    monkeypatch.setattr(schedule, "_signal", lambda process, number: process.receive(number))

    def build(workers: dict[str, list[Any]], needs: dict[str, list[str]] | None = None, **limits: float) -> Any:
        clock = Clock()
        made: dict[str, Any] = {}
        for name in workers:
            before = tuple(made[one] for one in (needs or {}).get(name, ()))
            made[name] = Job(name, tmp_path / name, "train", before)
        started: list[tuple[str, float, Worker]] = []

        def start(job: Any, command: Sequence[str]) -> Worker:
            worker = Worker(clock, **workers[job.name].pop(0))
            started.append((job.name, clock.now, worker))
            return worker

        given = {"share": 2, "stop_at": 1e9, "kill_at": 2e9, "least": 0.0} | limits
        found = schedule.Schedule(
            [*made.values()], lambda job: [], start, **given, on_done=lambda job: None, say=lambda text: None,
            now=clock, pause=clock.pause,
        )  # fmt: skip
        return found, started

    return build


def test_the_next_run_starts_when_one_ends(schedule_of: Any) -> None:
    schedule, started = schedule_of({name: [{"needs": 10.0}] for name in "abc"} | {"d": [{"needs": 1.0}]}, {"d": ["a"]})
    schedule.run()
    times = {name: round(at) for name, at, _ in started}
    assert times == {"a": 0, "b": 0, "c": 10, "d": 10}
    assert all(job.done for job in schedule.jobs)
    (part,) = map(json.loads, (schedule.jobs[0].folder / "parts.jsonl").read_text().splitlines())
    assert part["beside"] == ["b"] and part["code"] == 0


def test_all_runs_are_stopped_in_time_and_the_stubborn_are_killed(schedule_of: Any) -> None:
    schedule, started = schedule_of(
        {"a": [{"needs": 999.0, "slow": 5.0}], "b": [{"needs": 999.0, "slow": 99.0}], "c": [{"needs": 1.0}]},
        stop_at=100.0,
        kill_at=110.0,
    )
    schedule.run()
    assert [worker.signals for _, _, worker in started] == [[signal.SIGTERM], [signal.SIGTERM, signal.SIGKILL]]
    assert schedule.stopped and not schedule.failed
    assert not any(job.done for job in schedule.jobs)


def test_nothing_is_started_shortly_before_the_end(schedule_of: Any) -> None:
    schedule, started = schedule_of(
        {"a": [{"needs": 50.0}], "b": [{"needs": 50.0}]}, share=1, stop_at=100.0, least=60.0
    )
    schedule.run()
    assert [name for name, _, _ in started] == ["a"]


def test_a_failed_job_is_tried_once_more(schedule_of: Any) -> None:
    bad = {"needs": 1.0, "code": 1}
    schedule, started = schedule_of(
        {"a": [dict(bad), {"needs": 1.0}], "b": [dict(bad), dict(bad)], "c": [{"needs": 1.0}]}, {"c": ["b"]}
    )
    schedule.run()
    assert [name for name, _, _ in started] == ["a", "b", "a", "b"]
    assert [job.name for job in schedule.failed] == ["b"]
    assert [job.done for job in schedule.jobs] == [True, False, False]


@pytest.mark.slow
def test_a_killed_and_an_interrupted_study_end_like_one_that_ran_through(tmp_path: Path) -> None:
    """Whole processes: the study is stopped while its run trains, continued, killed, and continued again."""
    command = [sys.executable, str(BENCHMARKS / "study.py"), "gsm8k-long", "--tiny", "--set", "loop.total_steps=120"]

    def begin(out: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, "--out", str(out), "--export", str(out)], start_new_session=True)

    def steps(out: Path) -> int:
        return sum(
            text.count('"kind": "step"') for text in map(Path.read_text, out.glob("*/*/train/*/*/metrics.jsonl"))
        )

    def reaches(out: Path, count: int) -> None:
        end = time.monotonic() + 600
        while steps(out) < count:
            assert time.monotonic() < end
            time.sleep(0.1)

    through, broken = tmp_path / "through", tmp_path / "broken"
    assert begin(through).wait(900) == 0
    process = begin(broken)
    reaches(broken, 5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(600) == 75
    (unfinished,) = records_of(broken / "gsm8k-long.tar", tmp_path / "unfinished").values()
    done = len(unfinished["steps"]["reward/mean"])
    assert unfinished["status"] == "unfinished" and 5 <= done < 120
    process = begin(broken)
    reaches(broken, done + 5)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert begin(broken).wait(900) == 0
    sides = [
        next(iter(records_of(folder / "gsm8k-long.tar", tmp_path / f"{folder.name}-records").values()))
        for folder in (through, broken)
    ]
    for one in sides:
        assert one["status"] == "finished"
        one["steps"] = {k: v for k, v in one["steps"].items() if not k.startswith(("timing/", "perf/"))}
        for evaluation in one["evaluations"]["at"]:
            del evaluation["seconds"]
    assert sides[0]["steps"] == sides[1]["steps"]
    assert sides[0]["evaluations"] == sides[1]["evaluations"]
    assert len(list((broken / "gsm8k-long").glob("grpo-s0/train/*/*"))) == 1


# -- Statistics --------------------------------------------------------------------------------------------------------


def test_an_interval_over_seeds_and_tasks_covers_the_mean_it_estimates() -> None:
    """Seeds, tasks and their combinations each add a normal deviate; 95 % of the intervals must hold the true mean."""
    from studies.paired import crossed

    rng = random.Random(0)
    for of_seeds, of_tasks, of_both in ((0.0, 1.0, 1.0), (0.3, 0.5, 1.0), (1.0, 0.1, 0.1)):
        held = 0
        for _ in range(400):
            seeds, tasks = [rng.gauss(0, of_seeds) for _ in range(3)], [rng.gauss(0, of_tasks) for _ in range(60)]
            found = crossed([[s + t + rng.gauss(0, of_both) for t in tasks] for s in seeds])
            held += found.low <= 0 <= found.high
        assert held >= 0.92 * 400, (of_seeds, of_tasks, of_both, held)


def test_an_order_needs_more_than_one_seed_and_an_interval_without_zero() -> None:
    from studies.paired import compare

    low, high = [0.0] * 30 + [1.0] * 10, [0.0] * 10 + [1.0] * 30
    one = compare("a", "b", [low], [high])
    assert one.p < 0.001 and not one.is_clear and "says nothing about the methods" in one.sentence()
    three = compare("a", "b", [low] * 3, [high] * 3)
    assert three.is_clear and three.sentence().startswith("b is 50.0 points above a [")
    mixed = compare("a", "b", [low, high, low], [high, low, high])
    assert not mixed.is_clear and mixed.sentence().endswith("within noise.")
    assert [round(value, 3) for value in mixed.by_seed] == [0.5, -0.5, 0.5]


def test_equal_time_is_what_every_run_has_reached() -> None:
    from studies.reading import at_time, cumulative_seconds

    record = {
        "steps": {"timing/step": [1.0, 2.0, 3.0, 4.0]},
        "evaluations": {"at": [{"step": n, "rewards": {"x": [n]}} for n in (0, 2, 4)]},
    }
    assert cumulative_seconds(record) == [0, 1, 3, 6, 10]
    assert [at_time(record, "x", seconds).step for seconds in (2.9, 3.0, 9.9, 10.0)] == [0, 2, 2, 4]


# -- Records -----------------------------------------------------------------------------------------------------------


def made_up(experiment: str, seed: int, verdicts: Sequence[float], **changes: Any) -> dict[str, Any]:
    return {
        **{"schema": 1, "study": "gsm8k", "experiment": experiment, "seed": seed, "status": "finished", "tiny": False},
        "settings": {"learner": {"lr": 1e-6}, "logging": {"output_dir": str(seed)}},
        "steps": {"timing/step": [1.0]},
        "evaluations": {"tasks": [*range(len(verdicts))], "at": [{"step": 1, "rewards": {"math_equal": [*verdicts]}}]},
        **changes,
    }


def archive_of(folder: Path, *records: dict[str, Any]) -> Path:
    from studies.record import pack, write_record

    for record in records:
        write_record(record, folder / "work")
    pack(folder / "work", folder / "gsm8k.tar")
    return folder / "gsm8k.tar"


def test_a_repeated_study_fails_where_it_is_worse_than_the_interval_allows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import compare_study
    from studies.record import write_record

    good, bad = [1.0] * 30 + [0.0] * 10, [1.0] * 10 + [0.0] * 30
    for seed, name in product((0, 1), ("grpo", "rloo")):
        write_record(made_up(name, seed, good), tmp_path / "committed/gsm8k")

    def code(*records: dict[str, Any]) -> int:
        archive = archive_of(tmp_path / str(len(records)) / records[-1]["experiment"], *records)
        return compare_study.main(["--archive", str(archive), "--baseline", str(tmp_path / "committed")])

    noisy = [1.0] * 29 + [0.0] * 11
    assert code(made_up("grpo", 0, good), made_up("grpo", 1, noisy)) == 0
    assert code(made_up("grpo", 0, bad), made_up("grpo", 1, bad), made_up("rloo", 0, good)) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.rstrip(" |").endswith("worse") for row in rows if "grpo" in row or "rloo" in row] == [
        False,
        True,
        False,
    ]
    with pytest.raises(SystemExit, match=r"other settings than those of the record: learner.lr \(1e-06 → 0.1\)"):
        code(made_up("rloo", 0, good, settings={"learner": {"lr": 0.1}}))


def test_finished_records_stay_and_tiny_ones_are_refused(tmp_path: Path) -> None:
    import publish_studies

    done = archive_of(tmp_path / "done", made_up("grpo", 0, [1.0]))
    later = archive_of(tmp_path / "later", made_up("grpo", 0, [0.0], status="unfinished"))
    assert publish_studies.add(done, tmp_path / "records") == ["gsm8k/grpo-s0.json.gz: finished"]
    (line,) = publish_studies.add(later, tmp_path / "records")
    assert line == "gsm8k/grpo-s0.json.gz: kept, the new one is unfinished"
    with pytest.raises(SystemExit, match="is of a tiny model"):
        publish_studies.add(archive_of(tmp_path / "tiny", made_up("grpo", 0, [1.0], tiny=True)), tmp_path / "records")


def test_a_large_record_loses_the_details_in_the_middle(tmp_path: Path) -> None:
    from studies.record import MOST, read_record, write_record

    rng = random.Random(0)

    def evaluation(step: int) -> dict[str, Any]:
        tokens = [rng.randrange(10**6) for _ in range(100_000)]
        return {
            "step": step,
            "rewards": {"x": [1]},
            **{key: [0] for key in ("turns", "tools", "cut")},
            "tokens": tokens,
        }

    record = made_up("grpo", 0, [1.0])
    record["evaluations"]["at"] = [evaluation(step) for step in range(5)]
    path = write_record(record, tmp_path)
    assert path.stat().st_size <= MOST
    assert ["tokens" in one for one in read_record(path)["evaluations"]["at"]] == [True, False, False, False, True]


# -- Data --------------------------------------------------------------------------------------------------------------


def test_no_training_task_of_a_study_is_tested(tmp_path: Path) -> None:
    from studies.catalogue import STUDIES
    from studies.data import prepare, read
    from studies.plan import GENERATED

    source = shared_folder() / "data"
    if not source.is_dir():
        pytest.skip("the folder of public data is not here")
    for study in STUDIES.values():
        if study.data == GENERATED:  # covey train keeps the two splits of its tasks apart
            continue
        folder = prepare(study.data, source, tmp_path / study.data)
        files = {key: folder / Path(study.settings[f"data.{key}_files"]).name for key in ("train", "val")}
        asked = {key: {row["question"] for row in read(path)} for key, path in files.items()}
        assert asked["train"] and asked["val"] and not asked["train"] & asked["val"], study.name
        for experiment in study.experiments:
            if name := experiment.demonstrations.get("data.train_files"):
                shown = {row["messages"][0]["content"] for row in read(folder / Path(name).name)}
                assert shown and not shown & (asked["train"] | asked["val"]), experiment.name
    groups = [row["data_id"].split("/")[0] for row in read(tmp_path / "ifeval/ifeval-test.jsonl")]
    assert set(groups) == {"seen", "unseen"}


def test_settings_of_all_studies_are_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from studies import tiny as small
    from studies.catalogue import STUDIES
    from studies.data import prepare
    from studies.plan import words

    source, model = small.make_source(tmp_path / "source"), small.make_model(tmp_path / "model")
    for study in STUDIES.values():
        data = prepare(study.data, source, tmp_path / study.data)
        for experiment in study.experiments:
            given = words({**study.settings, **experiment.settings, "model.name": str(model)}, str(data))
            assert covey(["train", "--validate-only", *given, "sandbox.allow_weak=true"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert r"\\boxed" not in out
