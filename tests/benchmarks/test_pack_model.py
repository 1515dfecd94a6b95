"""A folder in pieces arrives over several uploads and is put together with its checksums."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "from/model"
    (folder / "deep").mkdir(parents=True)
    (folder / "weights").write_bytes(random.Random(0).randbytes(3_000_000))
    (folder / "deep/config.json").write_text("{}")
    (folder / "empty").write_bytes(b"")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_pieces_of_several_uploads_become_the_folder(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pack_model

    carried, upload = tmp_path / "carried", tmp_path / "upload"
    assert pack_model.main(["split", str(model), "--out", str(carried), "--mib", "1"]) == 0
    pieces = sorted(carried.glob("model.0*"))
    assert [path.name for path in pieces] == ["model.000", "model.001", "model.002"]
    assert max(path.stat().st_size for path in pieces) == 1 << 20
    words = ["join", str(upload), "--hold", str(tmp_path / "hold"), "--to", str(tmp_path / "to")]
    for number, piece in enumerate(pieces):  # each upload replaces the one before
        shutil.rmtree(upload, ignore_errors=True)
        upload.mkdir()
        shutil.copy(carried / "model.json", upload)
        shutil.copy(piece, upload)
        assert pack_model.main(words) == (75 if number < 2 else 0)
    assert "model: 1 pieces are missing: model.002" in capsys.readouterr().out
    assert contents(tmp_path / "to/model") == contents(model)
    before = {path.name: path.read_bytes() for path in carried.iterdir()}
    pack_model.split(model, carried, 1 << 20)
    assert {path.name: path.read_bytes() for path in carried.iterdir()} == before


def test_a_damaged_piece_is_refused(model: Path, tmp_path: Path) -> None:
    import pack_model

    manifest = pack_model.split(model, tmp_path / "carried", 1 << 20)
    piece = tmp_path / "carried/model.001"
    piece.write_bytes(piece.read_bytes()[:-1] + b"x")
    with pytest.raises(SystemExit, match=r"model.001 is damaged"):
        pack_model.join(manifest, tmp_path / "hold", tmp_path / "to")
    assert not (tmp_path / "to").exists()
