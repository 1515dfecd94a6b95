"""Heartbeats in logs, and progress lines with speed and ETA."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from covey.config.schema import LoggingConfig
from covey.telemetry import RunInfo, report_activity
from covey.telemetry import progress as module
from covey.telemetry.console import PlainConsole
from covey.telemetry.history import RunState
from covey.telemetry.progress import ProgressLine


class Log:
    """A plain console with a manual clock, which ticks every second as the thread would."""

    def __init__(self, info: RunInfo) -> None:
        self.time = 0.0
        self.file = io.StringIO()
        self.console = PlainConsole(RunState(info), self.file, now=lambda: self.time)
        self.console.heartbeat.start = lambda: None  # type: ignore[method-assign]
        self.seen = len(self.file.getvalue())

    def after(self, seconds: int) -> list[str]:
        """What is printed in that time."""
        for _ in range(seconds):
            self.time += 1
            self.console.heartbeat.tick()
        new, self.seen = self.file.getvalue()[self.seen :], len(self.file.getvalue())
        return new.splitlines()


def test_an_evaluation_before_training(info: RunInfo) -> None:
    log = Log(info)
    log.console.stage("evaluate")
    assert log.after(1) == []
    assert log.after(1) == ["evaluating before training ..."]
    log.console.progress(40, 200, "answers")
    assert log.after(9) == []
    assert log.after(1) == ["evaluating before training: 40 of 200 answers, 12s"]
    log.console.progress(80, 200, "answers")
    assert log.after(21) == [
        "evaluating before training: 80 of 200 answers, 22s",
        "evaluating before training: 80 of 200 answers, 32s",
    ]
    log.console.stage(None)
    assert log.after(100) == []


def test_quick_stages_print_nothing(info: RunInfo) -> None:
    log = Log(info)
    for name in ("publish", "evaluate", "rollout", "update", None):
        log.console.stage(name)
        assert log.after(1) == []


def test_a_long_first_step_reports_its_stage(info: RunInfo) -> None:
    log = Log(info)
    log.console.stage("rollout")
    log.console.progress(1, 64, "answers")
    assert log.after(12) == ["first step: sampling ...", "first step: sampling: 1 of 64 answers, 12s"]
    log.console.stage("update")  # what was counted was the sampling's
    assert log.after(25) == [
        "first step: updating the model ...",
        "first step: updating the model: 12s",
        "first step: updating the model: 22s",
    ]


def test_the_first_publish_waits_for_vllm_to_start(info: RunInfo) -> None:
    log = Log(replace(info, config={"rollout": {"name": "vllm"}}))
    log.console.stage("publish")
    assert log.after(2) == ["starting vLLM ..."]
    log.console.step(0, {}, None, [])
    log.console.stage("publish")
    assert log.after(60)[-1] == "sending the weights to the engine: 1m00s"


def test_later_steps_print_a_heartbeat_after_a_minute(info: RunInfo) -> None:
    log = Log(info)
    log.console.stage("rollout")
    log.console.step(0, {"reward/mean": 0.5}, None, [])
    assert len(log.after(0)) == 1
    log.console.stage("rollout")
    assert log.after(40) == []
    log.console.stage("update")  # the silence goes on
    assert log.after(19) == []
    assert log.after(1) == ["updating the model: 20s"]
    assert log.after(59) == []
    log.console.note("a line of its own")
    assert log.after(59) == ["a line of its own"]
    assert log.after(1) == ["updating the model: 2m19s"]


def test_heartbeats_before_the_console_is_open(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANNOUNCE_SECONDS", 0.0)
    monkeypatch.setattr(module, "TICK_SECONDS", 0.01)

    def printed(logging: LoggingConfig) -> str:
        with report_activity("loading a model", logging):
            deadline = time.monotonic() + (5 if logging == LoggingConfig() else 0.1)
            said = ""
            while not said and time.monotonic() < deadline:
                time.sleep(0.01)
                said = capsys.readouterr().out
        return said

    assert printed(LoggingConfig()) == "loading a model ...\n"
    assert printed(LoggingConfig(verbosity="warning")) == ""
    assert printed(LoggingConfig(to=[])) == ""


def test_a_run_in_a_pipe_prints_heartbeats_before_its_first_metrics(tmp_path: Path, tiny_model_folder: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\n\ndef slow(answer):\n    time.sleep(0.4)\n    return 0.0\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "x"}\n')
    quick = "from covey.telemetry import progress as h\n"
    quick += "h.ANNOUNCE_SECONDS, h.TICK_SECONDS, h.HEARTBEAT_SECONDS = 0.0, 0.005, 0.1"
    words = ["train", f"model={tiny_model_folder}", "data.train_files=rows.jsonl", "data.val_files=rows.jsonl"]
    small = ["rollout.max_tokens=2", "rollout.group_size=2", "data.train_batch_size=1", "loop.total_steps=1"]
    code = f"{quick}\nfrom covey.cli.main import main\nmain({[*words, *small, 'reward=slow.py:slow']!r})"
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    lines = out.splitlines()
    (loading, evaluating, sampling) = (
        next(place for place, line in enumerate(lines) if line.startswith(text))
        for text in ("loading ", "evaluating before training: 1 of 1 answers", "first step: sampling: 2 of 2 answers")
    )
    (evaluated,) = (place for place, line in enumerate(lines) if line.startswith("eval  0/1"))
    (stepped,) = (place for place, line in enumerate(lines) if line.startswith("step  1/1"))
    assert loading < evaluating < evaluated < sampling < stepped


# -- Progress lines ----------------------------------------------------------------------------------------------------


def test_a_line_every_few_seconds_and_at_the_end() -> None:
    clock, out = [100.0], io.StringIO()
    with ProgressLine(50, 10, unit="answers", file=out, now=lambda: clock[0]) as line:
        clock[0] += 60.0  # a model is loaded
        line.start_clock()
        for seconds, count in ((2.0, 4), (4.0, 6), (1.0, 10), (10.0, 20)):
            clock[0] += seconds
            line.advance(count, tokens=60, what="m on sums")
    assert out.getvalue().splitlines() == [
        "m on sums  14/50 answers  30 tok/s  eta 18s",  # 4 in 2 seconds: 36 take 18
        "m on sums  30/50 answers  26 tok/s  eta 7.0s",  # 20 in 7 seconds: 20 take 7
        "m on sums  50/50 answers  14 tok/s  took 17s",
    ]
