"""SIGTERM, Ctrl-C, two processes on one folder, forks that outlive a run, and clocks that are set back."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest

from covey.app.sweep import new_base
from covey.cli import runs
from covey.cli.main import main
from covey.storage import is_locked, lock_folder
from covey.telemetry.history import read_run
from tests.faults.crashes import CrashHarness, Plan, crashed

SYNC, AHEAD = crashed.MODES["sync"], crashed.MODES["async-fifo"]


def only_run(folder: Path) -> Path:
    (run,) = crashed.runs(folder)
    return run


@pytest.mark.parametrize("mode", ["sync", "sft"])
def test_ctrl_c_in_the_middle_of_a_line_writes_the_line(harness: CrashHarness, mode: str) -> None:
    words, folder = crashed.MODES[mode], harness.folder()
    # In sync mode a step writes three episodes and its metrics: the signal comes in the first line of the third step.
    at = {"sync": 30, "sft": 11}[mode]
    assert harness.nest.run(folder, words, Plan(places=["line"], at=at, signal=signal.SIGINT)) == 130
    run = only_run(folder)
    assert crashed.status(run) == "interrupted"
    recorded = crashed.records(run)  # raises if a line is torn
    assert [r["step"] for r in recorded if r["kind"] == "step"] == [0, 1, 2]
    output = (folder / "log.txt").read_text()
    assert "stopping; Ctrl-C again exits immediately" in output
    assert "the same command continues from the last checkpoint, after step 2\n" in output
    assert harness.nest.run(folder, words) == 0
    assert crashed.outcome(folder) == harness.expected(words)


@pytest.mark.parametrize("mode", ["sync", "sft"])
def test_sigterm_saves_and_exits_with_143(harness: CrashHarness, mode: str) -> None:
    words, folder = crashed.MODES[mode], harness.folder()
    assert harness.nest.run(folder, words, Plan(places=["update"], at=1, signal=signal.SIGTERM)) == 143
    run = only_run(folder)
    assert crashed.status(run) == "interrupted"
    assert [path.name for path in run.glob("checkpoints/*")] == ["step-000001"]
    output = (folder / "log.txt").read_text()
    assert "stopped by SIGTERM; everything is saved, and " in output
    assert "the same command continues from the last checkpoint, after step 1\n" in output
    assert harness.nest.run(folder, words) == 0
    assert crashed.outcome(folder) == harness.expected(words)


@pytest.mark.parametrize(("mode", "done"), [("sync", 0), ("sync", 3), ("sft", 0), ("sft", 3), ("async-fifo", 0)])
def test_no_step_follows_sigterm_during_an_evaluation(harness: CrashHarness, mode: str, done: int) -> None:
    """Before the first step, or after the third: the evaluation is completed and recorded, and a checkpoint written."""
    words, folder = crashed.MODES[mode], harness.folder()
    place = "sft-evaluate" if mode == "sft" else "evaluate"
    at = 1 if done == 0 else 3  # each evaluation passes a moment before it and one after it
    assert harness.nest.run(folder, words, Plan(places=[place], at=at, signal=signal.SIGTERM)) == 143
    run = only_run(folder)
    assert crashed.status(run) == "interrupted"
    assert [r["step"] for r in crashed.records(run) if r["kind"] == "step"] == [*range(done)]
    assert [r["step"] for r in crashed.records(run) if r["kind"] == "eval"] == ([0] if done == 0 else [0, 3])
    assert (run / "checkpoints" / f"step-{done:06d}").is_dir()
    output = (folder / "log.txt").read_text()
    assert f"continues from the last checkpoint, after step {done}\n" in output
    assert harness.nest.run(folder, words) == 0, (folder / "log.txt").read_text()
    if mode == "async-fifo":  # sampled with weights of any age: every group once
        assert crashed.steps_once(folder)
    else:
        assert crashed.outcome(folder) == harness.expected(words)


def test_no_step_follows_sigterm_while_a_planned_checkpoint_is_written(harness: CrashHarness) -> None:
    words, folder = SYNC, harness.folder()
    assert harness.nest.run(folder, words, Plan(places=["checkpoint"], at=1, signal=signal.SIGTERM)) == 143
    run = only_run(folder)
    assert [r["step"] for r in crashed.records(run) if r["kind"] == "step"] == [0, 1]
    assert [path.name for path in run.glob("checkpoints/*")] == ["step-000002"]
    assert harness.nest.run(folder, words) == 0, (folder / "log.txt").read_text()
    assert crashed.outcome(folder) == harness.expected(words)


def test_sigterm_ends_a_whole_sweep(harness: CrashHarness) -> None:
    folder = harness.folder()
    words = ["train", "--multirun", *SYNC[1:], "seed=1,2"]
    assert harness.nest.run(folder, words, Plan(places=["update"], at=1, signal=signal.SIGTERM)) == 143
    (run,) = folder.glob("multirun/*/*/*/run.json")
    assert run.parent.name == "0" and crashed.status(run.parent) == "interrupted"


def test_two_sweeps_started_in_the_same_second_have_separate_folders(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("covey.app.sweep.datetime", type("Stopped", (), {"now": lambda: datetime(2026, 1, 31, 14, 5, 9)}))
        found = [new_base(tmp_path).relative_to(tmp_path) for _ in range(2)]
    assert found == [Path("2026-01-31/14-05-09"), Path("2026-01-31/14-05-09-1")]


def descendants(pid: int) -> list[int]:
    children = [int(word) for t in Path(f"/proc/{pid}/task").iterdir() for word in (t / "children").read_text().split()]
    return [*children, *(further for child in children for further in descendants(child))]


def test_sigterm_to_every_process_of_a_job(harness: CrashHarness) -> None:
    """As Slurm and systemd send it. Rewards and environments are needed until the step ends."""
    words, folder = crashed.MODES["tools"], harness.folder()
    child = harness.nest.start(folder, words)
    while not any(path.stat().st_size for path in folder.glob("outputs/*/*/metrics.jsonl")):
        assert child.running(0.01), child.log()
    everybody = [child.pid, *descendants(child.pid)]
    assert len(everybody) > 2
    for pid in everybody:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert child.wait() == 143, child.log()
    assert harness.nest.run(folder, words) == 0, (folder / "log.txt").read_text()
    steps = [r["metrics"] for r in crashed.records(crashed.finished_run(folder)) if r["kind"] == "step"]
    assert [step["episodes/failed"] for step in steps] == [0.0] * crashed.STEPS


def test_a_second_ctrl_c_does_not_wait_for_the_learner(harness: CrashHarness) -> None:
    folder = harness.folder()
    child = harness.nest.start(folder, AHEAD, Plan(places=["update"], at=3, pause=600))  # its thread stays busy
    while not (list(folder.glob("outputs/*/*/checkpoints/step-000001"))):
        assert child.running(0.02), child.log()
    child.running(1.0)
    child.signal(signal.SIGINT)
    assert child.running(1.0), "the first one waits for what computes"
    child.signal(signal.SIGINT)
    assert child.wait(30) == 130
    assert harness.nest.run(folder, AHEAD) == 0, (folder / "log.txt").read_text()
    assert crashed.status(only_run(folder)) == "finished"


def test_two_processes_on_one_folder_and_workers_that_outlive_a_kill(harness: CrashHarness) -> None:
    folder = harness.folder()
    child = harness.nest.start(folder, SYNC, Plan(places=["update"], at=5, pause=600))
    while not (list(folder.glob("outputs/*/*/checkpoints/step-000002"))):
        assert child.running(0.02), child.log()
    run = only_run(folder)
    workers = [int(pid) for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
    assert workers, "rewards run in processes of their own"
    os.kill(workers[0], signal.SIGSTOP)  # it survives its parent
    try:
        assert harness.nest.run(folder, [*SYNC, f"resume={run}"]) == 2
        assert "that run is still running" in (folder / "log.txt").read_text()
        child.signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        assert (run / ".lock").exists()
        assert harness.nest.run(folder, [*SYNC, f"resume={run}"]) == 0, (folder / "log.txt").read_text()
    finally:
        with suppress(ProcessLookupError):
            os.kill(workers[0], signal.SIGCONT)
    assert crashed.outcome(folder) == harness.expected(SYNC)


def test_a_run_that_was_killed_before_its_first_checkpoint_is_shown_as_killed(
    harness: CrashHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = harness.folder()
    assert harness.nest.run(folder, SYNC, Plan(places=["update"], at=1)) == -signal.SIGKILL
    run = only_run(folder)
    assert crashed.status(run) == "running", "the process could not write another one"
    lock = lock_folder(run)  # as if the process were alive
    assert read_run(run)["status"] == "running"
    lock.close()
    assert read_run(run)["status"] == "killed"
    assert main(["runs", str(folder / "outputs")]) == 0
    shown = capsys.readouterr().out
    assert "killed" in shown and "running" not in shown
    runs.watch(run, lambda: pytest.fail("there is nothing to wait for"))
    assert capsys.readouterr().out.splitlines()[-1] == f"killed after 0 of {crashed.STEPS} steps"
    assert main(["report", str(run), "--markdown"]) == 0
    assert f"0 of {crashed.STEPS} steps, killed" in capsys.readouterr().out

    assert harness.nest.run(folder, SYNC) == 0, (folder / "log.txt").read_text()
    assert crashed.status(run) == "killed", "written down by the next run"
    (other,) = set(crashed.runs(folder)) - {run}
    assert crashed.status(other) == "finished"
    output = (folder / "log.txt").read_text()
    assert output.count("was killed before its first checkpoint; a new run starts") == 1 and run.name in output


def test_is_locked_does_not_prevent_a_run_from_starting(tmp_path: Path) -> None:
    """`is_locked` holds a shared lock for a moment; `lock_folder` tries again."""
    lock_folder(tmp_path).close()
    look = os.open(tmp_path / ".lock", os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    assert is_locked(tmp_path) is False, "two may look at once"
    threading.Timer(0.02, os.close, [look]).start()
    with lock_folder(tmp_path):
        assert is_locked(tmp_path) is True
    assert is_locked(tmp_path / "nothing") is None


def test_a_fork_does_not_hold_the_lock(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(tell, b"!")
        signal.pause()
        os._exit(0)
    try:
        os.read(ready, 1)
        with pytest.raises(BlockingIOError):
            lock_folder(tmp_path)
        lock.close()
        lock_folder(tmp_path).close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_the_newest_run_is_the_last_one_started_whatever_the_clock(harness: CrashHarness) -> None:
    folder = harness.folder()
    tomorrow, today = Plan(places=["update"], at=7, clock=86400.0), Plan(places=["update"], at=7)
    assert harness.nest.run(folder, SYNC, tomorrow) == -signal.SIGKILL
    (first,) = crashed.runs(folder)
    assert harness.nest.run(folder, [*SYNC, "resume=disable"], today) == -signal.SIGKILL
    (second,) = set(crashed.runs(folder)) - {first}
    assert second < first, "by its name it is the older one"
    assert harness.nest.run(folder, SYNC) == 0
    assert (crashed.status(second), crashed.status(first)) == ("finished", "running")


def test_a_clock_that_keeps_going_back_changes_nothing(harness: CrashHarness) -> None:
    folder = harness.folder()
    assert harness.nest.run(folder, [*SYNC, "loop.max_minutes=100"], Plan(drift=1000.0, places=["update"], at=7)) < 0
    assert harness.nest.run(folder, [*SYNC, "loop.max_minutes=100"], Plan(drift=1000.0)) == 0
    found, expected = crashed.outcome(folder), dict(harness.expected(SYNC))
    del found["config.yaml"], expected["config.yaml"]  # in the checkpoint: only this run has a time limit
    assert found == expected  # and no duration is negative


# --- the same seed and command ----------------------------------------------------------------------------------------


def test_sampling_with_tools_does_not_depend_on_order_or_number_of_workers(harness: CrashHarness) -> None:
    found = []
    for workers in (2, 5):
        folder = harness.folder()
        assert harness.nest.run(folder, crashed.MODES["tools"], Plan(workers=workers)) == 0, (
            folder / "log.txt"
        ).read_text()
        lines = (crashed.finished_run(folder) / "episodes.jsonl").read_text().splitlines()
        found.append([json.loads(line) for line in lines])
    one, other = found
    assert len(one) == crashed.STEPS * crashed.ATTEMPTS
    for a, b in zip(one, other, strict=True):
        assert a["messages"] == b["messages"] and a["rewards"] == b["rewards"] and len(a["rewards"]) == 2
        for row, same in zip(a["rows"], b["rows"], strict=True):
            assert row["response_ids"] == same["response_ids"] and row["mask"] == same["mask"]
            assert row["logprobs"] == pytest.approx(same["logprobs"], abs=1e-4)
