"""The record of `covey serve` when clients disappear and disks are full."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.app.serving import Recorder, make_registry
from covey.config.schema import Config
from covey.gateway import registry
from covey.gateway.registry import EpisodeRules, Registry
from covey.storage import StorageFailed
from covey.telemetry.jsonl import PartWriter, whole_lines
from tests.gateway.running_gateway import USER, RunningGateway, ScriptedEngine, serve_engine, tokenizer


def ask(gateway: RunningGateway, key: str) -> Any:
    return gateway.post("/v1/chat/completions", key=key, json={"model": "tiny", "messages": [USER]})


def recording(gateway: RunningGateway, folder: Path) -> Recorder:
    gateway.registry.on_closed = record = Recorder(folder, lambda ids, special: str(list(ids)))
    return record


def ids_of(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_episodes_of_covey_serve_follow_the_settings_of_the_agent() -> None:
    collector = SimpleNamespace(renderer=None, max_response_tokens=7, keep_images=2)
    source = SimpleNamespace(tokenizer=tokenizer(), config=SimpleNamespace(model_type="llama"))
    prepared = SimpleNamespace(config=Config(), model=source)
    model: Any = SimpleNamespace(engine=None, collector=collector, prepared=prepared)
    policy: Any = make_registry(model, lambda episode: None).open_new().policy
    assert (policy.max_response_tokens, policy.keep_images) == (7, 2)


def test_a_failed_write_leaves_no_partial_line_and_can_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_engine(ScriptedEngine(lambda prompt, _: "hello")) as gateway:
        record = recording(gateway, tmp_path)
        first, late, last = (gateway.open() for _ in range(3))
        for opened in (first, late, last):
            assert ask(gateway, opened["key"]).status_code == 200
        assert gateway.post(f"/episodes/{first['id']}/reward", json={"reward": 1.0}).status_code == 200
        assert record.writer is not None
        real = record.writer._file

        class Full:
            def write(self, data: bytes) -> int:
                real.write(data[:10])
                raise OSError(28, "No space left on device")

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        monkeypatch.setattr(record.writer, "_file", Full())
        answer = gateway.post(f"/episodes/{late['id']}/reward", json={"reward": 1.0})
        assert answer.status_code == 500 and "No space left" in answer.text
        assert ask(gateway, late["key"]).status_code == 410
        monkeypatch.setattr(record.writer, "_file", real)
        for opened in (last, late):  # there is room again
            assert gateway.post(f"/episodes/{opened['id']}/reward", json={"reward": 1.0}).status_code == 200
    assert ids_of(record.path) == [first["id"], last["id"], late["id"]]


def test_a_partial_last_line_is_removed_when_the_folder_is_reused(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    assert whole_lines(path) == 0
    path.write_text('{"id": "old"}\n{"id": "to')
    with serve_engine(ScriptedEngine(lambda prompt, _: "hello")) as gateway:
        recording(gateway, tmp_path)
        opened = gateway.open()
        ask(gateway, opened["key"])
        gateway.post(f"/episodes/{opened['id']}/reward", json={"reward": 1.0})
    assert ids_of(path) == ["old", opened["id"]]


def test_whole_lines_over_parts(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    writer = PartWriter(path, 0, part_bytes=10)
    for _ in range(3):
        writer.write(b"123456789\n")
    writer.close()
    assert whole_lines(path) == 30
    with (tmp_path / "episodes-0002.jsonl").open("ab") as file:
        file.write(b"12")
    assert whole_lines(path) == 30
    os.truncate(tmp_path / "episodes-0002.jsonl", 4)
    assert whole_lines(path) == 20


def test_idle_episodes_are_closed_when_others_open(tmp_path: Path) -> None:
    with serve_engine(ScriptedEngine(lambda prompt, _: "hello")) as gateway:
        record = recording(gateway, tmp_path)
        gone, here = gateway.open(), gateway.open()
        for opened in (gone, here):
            ask(gateway, opened["key"])
        gateway.registry._open[gone["id"]].last_request_at -= registry.IDLE_SECONDS + 1
        gateway.open()
        assert ids_of(record.path) == [gone["id"]]
        assert ask(gateway, gone["key"]).status_code == 410
        assert ask(gateway, here["key"]).status_code == 200


def test_after_a_day_of_silence_the_token_opens_a_new_episode(tmp_path: Path) -> None:
    with serve_engine(ScriptedEngine(lambda prompt, _: "hello")) as gateway:
        record = recording(gateway, tmp_path)
        old = ask(gateway, gateway.registry.token).headers["x-covey-episode"]
        gateway.registry._open[old].last_request_at -= registry.IDLE_SECONDS + 1
        gateway.open()
        again = ask(gateway, gateway.registry.token)
        assert again.status_code == 200 and again.headers["x-covey-episode"] != old
        assert ids_of(record.path) == [old]


def test_an_idle_episode_that_cannot_be_written_is_kept_for_later(tmp_path: Path) -> None:
    full = True
    ended = []

    def record(episode: Any) -> None:
        if full:
            raise StorageFailed("the disk is full")
        ended.append(episode.id)

    with serve_engine(ScriptedEngine(lambda prompt, _: "hello")) as gateway:
        gateway.registry.on_closed = record
        old = gateway.open()
        ask(gateway, old["key"])
        gateway.registry._open[old["id"]].last_request_at -= registry.IDLE_SECONDS + 1
        gateway.open()
        assert old["id"] in gateway.registry._open
        full = False
        gateway.open()
        assert ended == [old["id"]] and old["id"] not in gateway.registry._open


def test_closing_tries_all_episodes_before_it_reports_a_full_disk() -> None:
    seen = []

    def refuse(episode: Any) -> None:
        seen.append(episode.id)
        raise StorageFailed("the disk is full")

    async def close() -> list[str]:
        made: Any = Registry(EpisodeRules("tiny"), new_policy=lambda: None, on_closed=refuse)  # type: ignore[arg-type,return-value]
        opened = [made.open_new().id for _ in range(3)]
        with pytest.raises(StorageFailed, match="the disk is full"):
            await made.close()
        return opened

    assert asyncio.run(close()) == seen
