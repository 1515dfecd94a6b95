"""covey runs, watch, report and dash, as they are typed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from covey.cli import runs
from covey.cli.main import main
from tests.dashboard.synthetic import faulty, healthy, write_run


def test_runs_lists_status_best_score_and_duration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series, _ = healthy(20)
    write_run(tmp_path / "a", series, {0: 0.2, 10: 0.75, 20: 0.6}, started="2026-01-01")
    config = {"data": {"val_size": 200}, "learner": {"lr": 1e-5}}
    facts = {"status": "interrupted", "total": 40, "started": "2026-01-02", "tags": ["baseline", "long"]}
    write_run(tmp_path / "b", *faulty("kl_growth", 20), config=config, **facts)
    assert main(["runs", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    one, two = (next(words for words in lines if words[:1] == [name]) for name in ("a", "b"))
    assert one[1:4] == ["covey/made:", "grpo", "lr=1e-6"] and two[1:4] == ["covey/made:", "grpo", "lr=1e-5"]
    assert one[4:8] == ["finished", "20/20", "0.750", "0.600"] and one[8] == "1m46s"  # 20 × 5 s and 3 × 2 s
    assert two[4:6] == ["interrupted", "20/40"] and two[-2:] == ["baseline,", "long"]


def test_watch_tells_what_is_new_until_the_run_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series, _ = faulty("kl_growth", 20)
    folder = write_run(tmp_path / "a", {k: v[:15] for k, v in series.items()}, {0: 0.2}, status="running", total=20)
    turns = 0

    def meanwhile() -> None:
        nonlocal turns
        turns += 1
        over = turns == 2
        write_run(folder, series, {0: 0.2}, status="finished" if over else "running", total=20)

    runs.watch(folder, meanwhile)
    lines = capsys.readouterr().out.splitlines()
    assert turns == 2
    assert [line.split()[1] for line in lines if line.startswith("step")] == [f"{n}/20" for n in range(16, 21)]
    assert sum("KL is growing too fast" in line for line in lines) == 1, "said once"
    assert lines[-1] == "finished after 20 of 20 steps"


def test_report_as_a_file_and_as_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a", *healthy(20))
    assert main(["report", str(folder)]) == 0
    assert "<title>covey</title>" in (folder / "report.html").read_text()
    capsys.readouterr()
    assert main(["report", str(folder), "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("## covey/made\n")
    assert main(["report"]) == 2 and main(["report", str(folder), "--episodes", "many"]) == 2


def test_dash_prints_a_link_that_works_and_ends_with_an_interrupt(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", *healthy(20))
    command = [sys.executable, "-c", "from covey.cli.main import main; import sys; sys.exit(main(sys.argv[1:]))"]
    with subprocess.Popen([*command, "dash", str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        link = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", link)
        address, token = link.split("/?token=")
        request = urllib.request.Request(
            f"{address}/api/runs", headers={"Cookie": f"covey_dash_{address.rsplit(':', 1)[1]}={token}"}
        )
        with urllib.request.urlopen(request) as reply:
            assert json.load(reply)["runs"][0]["title"] == "covey/made"
        process.send_signal(2)
        assert process.wait(20) == 130


def test_a_folder_without_runs_and_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    assert main(["dash", str(tmp_path)]) == 2
    assert "no run found" in capsys.readouterr().err
    folder = write_run(tmp_path / "a", *healthy(20))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["dash", str(folder), "--port", str(taken.getsockname()[1])]) == 2
    assert "fix: name another" in capsys.readouterr().err
