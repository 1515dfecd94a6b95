"""covey dash with many readers while a run writes, and with files that are not as they should be."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.dashboard.runs import Library
from covey.dashboard.server import Dash
from tests.dashboard.synthetic import episode, healthy, write_episodes, write_run

READERS, ROUNDS = 50, 3
PATHS = ("runs", "run?run=0", "series?run=0&names=reward/mean,grad/norm", "episodes?run=0&limit=20")


def until(true: Callable[[], bool]) -> None:
    """Wait for what must come, however crowded the machine is; in vain only where it never does."""
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def made(folder: Path) -> Path:
    write_run(folder, *healthy(20), started="2026-01-01")
    write_episodes(folder, [episode(step, 0, reward=0.5, tokens=12) for step in range(20)])
    return folder


def add_steps(folder: Path, first: int, count: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(first, first + count):
            print(json.dumps({"kind": "step", "step": step, "metrics": {"reward/mean": 0.5}}), file=file, flush=True)


def ask(dash: Dash, path: str) -> Any:
    line = http.client.HTTPConnection("127.0.0.1", dash.port, timeout=60)
    line.request("GET", f"/api/{path}", headers={"Cookie": f"covey_dash_{dash.port}={dash.token}"})
    reply = line.getresponse()
    body = reply.read()
    line.close()
    assert reply.status == 200, body
    return json.loads(body)


def test_fifty_readers_while_a_run_writes(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    troubles: list[BaseException] = []
    together = threading.Barrier(READERS + 1)

    def reader() -> None:
        try:
            together.wait()
            seen = 0
            for _ in range(ROUNDS):
                done = ask(dash, PATHS[0])["runs"][0]["done"]
                assert done >= seen, "steps that were shown are gone"
                seen = done
                for path in PATHS[1:]:
                    ask(dash, path)
        except BaseException as error:
            troubles.append(error)

    with Dash(Library([folder])) as dash:
        ask(dash, "episodes?run=0")
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
        readers = [threading.Thread(target=reader) for _ in range(READERS)]
        for thread in readers:
            thread.start()
        together.wait()
        add_steps(folder, 20, 200)
        for thread in readers:
            thread.join()
        assert troubles == []
        until(lambda: ask(dash, "runs")["runs"][0]["done"] == 220)
        until(lambda: threading.active_count() <= threads)
        if sys.platform == "linux":
            assert len(os.listdir("/proc/self/fd")) <= files + 1


def test_a_crowd_that_comes_at_once_is_let_in(tmp_path: Path) -> None:
    dash = Dash(Library([made(tmp_path / "run")]))  # it listens, and nobody accepts yet
    lines = [socket.create_connection(("127.0.0.1", dash.port), timeout=5) for _ in range(READERS)]
    for line in lines:
        line.close()
    dash._server.server_close()


def test_the_follower_survives_a_line_that_is_none_and_a_folder_that_is_deleted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.dashboard.server.FOLLOW_SECONDS", 0.01)
    broken, deleted, sound = (made(tmp_path / name) for name in ("broken", "deleted", "sound"))
    with Dash(Library([tmp_path])) as dash:
        states = {run["name"]: run for run in ask(dash, "runs")["runs"]}
        assert set(states) == {"broken", "deleted", "sound"}
        with (broken / "metrics.jsonl").open("a") as file:
            print('{"kind": "step", oops', file=file)
        shutil.rmtree(deleted)
        for folder in (broken, sound):
            add_steps(folder, 20, 5)

        def done() -> dict[str, int]:
            return {run["name"]: run["done"] for run in ask(dash, "runs")["runs"]}

        until(lambda: done()["broken"] == done()["sound"] == 25)
        assert done()["deleted"] == 20  # what was read of it stays
        output = {run["name"]: run["broken"] for run in ask(dash, "runs")["runs"]}
    assert output["broken"] == ["metrics.jsonl: 1 lines cannot be read and are skipped"] and output["sound"] == []
    assert "Traceback" not in capfd.readouterr().err
