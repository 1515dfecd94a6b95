"""Truncated, bit-flipped, missing and wrong files of a checkpoint are reported, and never used as intact."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest

from covey.errors import InputError
from covey.training.checkpoint import DamagedCheckpoint, open_checkpoint, step_folders
from tests.conftest import byte_tokenizer
from tests.training.test_checkpoint import store, trained_learner

CASES = 6  # positions in each file; the slow test has more


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 1 and 2."""
    folder, learner = tmp_path_factory.mktemp("saved"), trained_learner()
    for step in (1, 2):
        store(folder).save(step, learner, byte_tokenizer(), {"best": None})
    return folder


@pytest.fixture
def checkpoints(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def files_of(checkpoint: Path) -> list[str]:
    return sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())


def places(size: int, rng: random.Random, count: int) -> list[int]:
    """The first byte, the last, those around the middle, and any others."""
    return [0, size - 1, size // 2, *(rng.randrange(size) for _ in range(count - 3))]


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def damages(data: bytes, rng: random.Random, count: int) -> list[bytes]:
    """Truncated and bit-flipped at various positions; emptied; one byte too long; zeroed, as after a power loss."""
    found = [flipped(data, at, rng.randrange(8)) for at in places(len(data), rng, count)]
    found += [data[:at] for at in places(len(data), rng, count)]
    return [*found, b"", data + b"\n", bytes(len(data))]


def check_all_damages(checkpoints: Path, count: int, seed: int) -> int:
    """Damage every file of the newest checkpoint in every way: it is reported, or loads exactly as saved."""
    newest, rng, cases = checkpoints / "step-000002", random.Random(seed), 0
    state = open_checkpoint(newest).state
    for name in files_of(newest):
        path = newest / name
        data = path.read_bytes()
        for damaged in damages(data, rng, count):
            path.write_bytes(damaged)
            cases += 1
            try:
                found = open_checkpoint(newest)
            except DamagedCheckpoint as error:
                assert "step-000002" in str(error)
            else:  # some changes of a manifest have no effect: the case of a hash's letter, a space
                assert name == "manifest.json" and json.loads(damaged) == json.loads(data), (name, damaged[:200])
                assert found.state == state
        path.write_bytes(data)
    assert open_checkpoint(newest).state == state
    return cases


def test_every_file_of_a_checkpoint_damaged_in_every_way(checkpoints: Path) -> None:
    assert check_all_damages(checkpoints, CASES, seed=0) > 100


@pytest.mark.slow
def test_every_file_of_a_checkpoint_damaged_in_many_ways(checkpoints: Path) -> None:
    assert sum(check_all_damages(checkpoints, 60, seed) for seed in range(1, 5)) > 4000


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "optimizer.safetensors", "model/model.safetensors"])
def test_a_missing_file(checkpoints: Path, name: str) -> None:
    (checkpoints / "step-000002" / name).unlink()
    warned: list[str] = []
    found = store(checkpoints).latest(warned.append)
    assert found is not None and found.step == 1
    assert "step-000002" in warned[0] and Path(name).name in warned[0]


JSON_OF_ANOTHER_KIND = ["[]", "null", "3", '"text"', "{}", "[" * 100_000, '{"step": "two"}', "\udcff"]


@pytest.mark.parametrize("text", JSON_OF_ANOTHER_KIND, ids=lambda text: text[:8])
@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_wrong_json(checkpoints: Path, name: str, text: str) -> None:
    """Also if the manifest matches it."""
    newest = checkpoints / "step-000002"
    (newest / name).write_text(text, errors="surrogateescape")
    if name != "manifest.json":
        resign(newest)
    with pytest.raises(DamagedCheckpoint, match="step-000002 is damaged"):
        open_checkpoint(newest)
    found = store(checkpoints).latest(lambda text: None)
    assert found is not None and found.step == 1


def resign(checkpoint: Path) -> None:
    """Write a manifest of the current files, so that checksums do not show the damage."""
    hashes = {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in files_of(checkpoint)}
    hashes.pop("manifest.json")
    (checkpoint / "manifest.json").write_text(json.dumps(hashes))


@pytest.mark.parametrize(
    "outside", ["../step-000001/state.json", "/etc/hostname", "model/../../step-000001/state.json"]
)
def test_a_manifest_with_paths_out_of_the_folder(checkpoints: Path, outside: str) -> None:
    newest = checkpoints / "step-000002"
    manifest = json.loads((newest / "manifest.json").read_text())
    real = Path(outside) if outside.startswith("/") else newest / outside
    manifest[outside] = hashlib.sha256(real.read_bytes()).hexdigest() if real.is_file() else "0" * 64
    (newest / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpoint, match="not inside it"):
        open_checkpoint(newest)


@pytest.mark.parametrize("planted", ["model/adapter_config.json", "critic.safetensors", "model/pytorch_model.bin"])
def test_a_file_that_the_manifest_does_not_name(checkpoints: Path, planted: str) -> None:
    (checkpoints / "step-000002" / planted).write_text("{}")
    with pytest.raises(DamagedCheckpoint, match="is not in its manifest"):
        open_checkpoint(checkpoints / "step-000002")
    (checkpoints / "step-000001" / "notes.md").write_text("a reader's own")
    assert open_checkpoint(checkpoints / "step-000001").step == 1


def test_if_all_are_damaged_nothing_is_started(checkpoints: Path) -> None:
    for step in (1, 2):
        (checkpoints / f"step-{step:06d}" / "manifest.json").write_bytes(b"")
    with pytest.raises(InputError) as output:
        store(checkpoints).latest(lambda text: None)
    for words in ("no intact checkpoint", "step-000001", "step-000002", "resume=disable"):
        assert words in str(output.value)
    assert len(step_folders(checkpoints)) == 2  # both are unchanged


def test_an_unreadable_checkpoint(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector."""
    import covey.training.checkpoint as room

    read = room.sha256

    def broken(path: Path) -> str:
        if "step-000002" in str(path) and path.name == "optimizer.safetensors":
            raise OSError(5, "Input/output error", str(path))
        return read(path)

    monkeypatch.setattr(room, "sha256", broken)
    warned: list[str] = []
    found = store(checkpoints).latest(warned.append)
    assert found is not None and found.step == 1 and "Input/output error" in warned[0]


def test_a_damaged_checkpoint_does_not_count_as_kept(checkpoints: Path) -> None:
    """It is renamed, so the two that are kept are both intact."""
    (checkpoints / "step-000002" / "state.json").write_text("")
    kept, learner = store(checkpoints, keep_last=2), trained_learner()
    assert kept.latest(lambda text: None) is not None
    assert (checkpoints / "damaged-step-000002").is_dir()
    for step in (3, 4):
        kept.save(step, learner, byte_tokenizer(), {"best": None})
    assert sorted(p.name for p in checkpoints.iterdir()) == ["damaged-step-000002", "step-000003", "step-000004"]


def test_later_checkpoints_of_an_earlier_attempt_do_not_count_as_kept(checkpoints: Path) -> None:
    store(checkpoints, keep_last=1).save(1, trained_learner(), byte_tokenizer(), {"best": None})
    assert open_checkpoint(checkpoints / "step-000001").step == 1  # the newly written one is not deleted
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-000001", "step-000002"]


def test_other_entries_of_the_folder_are_ignored(checkpoints: Path, tmp_path: Path) -> None:
    """Copies under other names are not checkpoints; of a link, only the link is deleted."""
    (tmp_path / "elsewhere").mkdir()
    shutil.move(checkpoints / "step-000001", tmp_path / "elsewhere" / "one")
    (checkpoints / "step-000001").symlink_to(tmp_path / "elsewhere" / "one")
    shutil.copytree(checkpoints / "step-000002", checkpoints / "step-000002-copy")
    (checkpoints / "step-notes.txt").write_text("a reader's own")
    assert open_checkpoint(checkpoints / "step-000001").step == 1
    kept = store(checkpoints, keep_last=1)
    kept.save(3, trained_learner(), byte_tokenizer(), {"best": None})
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-000002-copy", "step-000003", "step-notes.txt"]
    assert (tmp_path / "elsewhere" / "one" / "state.json").is_file()


def test_a_link_in_place_of_a_new_checkpoint(checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoints / "step-000002", tmp_path / "other")
    (checkpoints / "step-000003").symlink_to(tmp_path / "other")
    store(checkpoints).save(3, trained_learner(), byte_tokenizer(), {"best": None})
    assert not (checkpoints / "step-000003").is_symlink() and open_checkpoint(checkpoints / "step-000003").step == 3
    assert open_checkpoint(tmp_path / "other").step == 2


def test_a_million_steps_are_in_order(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 20):
        (tmp_path / f"step-{step:06d}").mkdir()
    assert [p.name for p in step_folders(tmp_path)] == ["step-000020", "step-999999", "step-1000000"]


def test_moments_of_another_model_are_refused(checkpoints: Path) -> None:
    from covey.config.schema import LearnerConfig
    from covey.learner.learner import Learner
    from tests.conftest import tiny_llama

    found = open_checkpoint(checkpoints / "step-000002")
    wide = Learner(tiny_llama(intermediate_size=96), LearnerConfig(), total_updates=1)
    with pytest.raises(InputError, match=r"another model: .* is \[32, 64\] there, \[32, 96\] here"):
        wide.restore(found.folder, found.state["learner"])
    flat = Learner(tiny_llama(num_hidden_layers=1), LearnerConfig(), total_updates=1)
    with pytest.raises(InputError, match="another model: it has a weight"):
        flat.restore(found.folder, found.state["learner"])
