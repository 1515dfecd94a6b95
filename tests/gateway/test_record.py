"""What `covey serve` writes down when clients vanish and disks are full."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from covey.app.serving import Recorder
from covey.gateway import Book, Rules, registry
from covey.storage import StorageFailed
from covey.telemetry.jsonl import PartWriter, whole_lines
from tests.gateway.house import USER, House, Scripted, serving


def ask(house: House, key: str) -> Any:
    return house.post("/v1/chat/completions", key=key, json={"model": "tiny", "messages": [USER]})


def recording(house: House, folder: Path) -> Recorder:
    house.book.on_closed = record = Recorder(folder, lambda ids, special: str(list(ids)))
    return record


def ids_of(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_a_refused_line_leaves_no_half_of_it_and_the_client_can_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Scripted(lambda prompt, _: "hello")) as house:
        record = recording(house, tmp_path)
        first, late, last = (house.open() for _ in range(3))
        for opened in (first, late, last):
            assert ask(house, opened["key"]).status_code == 200
        assert house.post(f"/episodes/{first['id']}/reward", json={"reward": 1.0}).status_code == 200
        assert record.writer is not None
        real = record.writer._file

        class Full:
            def write(self, data: bytes) -> int:
                real.write(data[:10])
                raise OSError(28, "No space left on device")

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        monkeypatch.setattr(record.writer, "_file", Full())
        answer = house.post(f"/episodes/{late['id']}/reward", json={"reward": 1.0})
        assert answer.status_code == 500 and "No space left" in answer.text
        assert ask(house, late["key"]).status_code == 410
        monkeypatch.setattr(record.writer, "_file", real)
        for opened in (last, late):  # there is room again
            assert house.post(f"/episodes/{opened['id']}/reward", json={"reward": 1.0}).status_code == 200
    assert ids_of(record.path) == [first["id"], last["id"], late["id"]]


def test_a_line_that_a_kill_tore_is_cut_off_when_the_folder_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    assert whole_lines(path) == 0
    path.write_text('{"id": "old"}\n{"id": "to')
    with serving(Scripted(lambda prompt, _: "hello")) as house:
        recording(house, tmp_path)
        opened = house.open()
        ask(house, opened["key"])
        house.post(f"/episodes/{opened['id']}/reward", json={"reward": 1.0})
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


def test_episodes_whose_clients_are_gone_end_when_others_come(tmp_path: Path) -> None:
    with serving(Scripted(lambda prompt, _: "hello")) as house:
        record = recording(house, tmp_path)
        gone, here = house.open(), house.open()
        for opened in (gone, here):
            ask(house, opened["key"])
        house.book._live[gone["id"]].used -= registry.SILENT + 1
        house.open()
        assert ids_of(record.path) == [gone["id"]]
        assert ask(house, gone["key"]).status_code == 410
        assert ask(house, here["key"]).status_code == 200


def test_after_a_day_of_silence_the_token_opens_a_new_episode(tmp_path: Path) -> None:
    with serving(Scripted(lambda prompt, _: "hello")) as house:
        record = recording(house, tmp_path)
        old = ask(house, house.book.token).headers["x-covey-episode"]
        house.book._live[old].used -= registry.SILENT + 1
        house.open()
        again = ask(house, house.book.token)
        assert again.status_code == 200 and again.headers["x-covey-episode"] != old
        assert ids_of(record.path) == [old]


def test_a_silent_episode_that_cannot_be_written_is_nobody_elses_trouble_and_not_lost(tmp_path: Path) -> None:
    full = True
    ended = []

    def record(live: Any) -> None:
        if full:
            raise StorageFailed("the disk is full")
        ended.append(live.id)

    with serving(Scripted(lambda prompt, _: "hello")) as house:
        house.book.on_closed = record
        old = house.open()
        ask(house, old["key"])
        house.book._live[old["id"]].used -= registry.SILENT + 1
        house.open()
        assert old["id"] in house.book._live
        full = False
        house.open()
        assert ended == [old["id"]] and old["id"] not in house.book._live


def test_a_full_disk_at_the_end_is_told_when_all_were_tried() -> None:
    seen = []

    def refuse(live: Any) -> None:
        seen.append(live.id)
        raise StorageFailed("the disk is full")

    async def close() -> list[str]:
        made: Any = Book(Rules("tiny"), new_policy=lambda: None, on_closed=refuse)  # type: ignore[arg-type,return-value]
        opened = [made.open_new().id for _ in range(3)]
        with pytest.raises(StorageFailed, match="the disk is full"):
            await made.close()
        return opened

    assert asyncio.run(close()) == seen
