"""Weights arrive as they were sent, or are not loaded: files, the collective group, and the transports' rules."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.storage import lock_folder
from covey.weights import buckets, files
from covey.weights.buckets import bucket_size
from covey.weights.collective import Rendezvous, WeightGroup, listen
from covey.weights.files import WeightsDamaged, read_weights, remove_older, weights_folder, write_weights
from covey.weights.names import load_weights, trained_weights
from covey.weights.transport import InProcessTransport
from tests.conftest import tiny_llama


def same(model: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("memory", [False, True])
def test_by_file_on_disk_and_in_memory(tmp_path: Path, memory: bool) -> None:
    folder = weights_folder(10**6) if memory else tmp_path
    learner, engine = tiny_llama(seed=1), tiny_llama(seed=2)
    for version in (0, 1):
        manifest = write_weights(trained_weights(learner), folder, version)
        load_weights(engine, read_weights(manifest, patience=0))
        remove_older(folder, version)
        assert same(learner, engine)
        assert [path.name for path in folder.iterdir()] == [f"version-{version}.safetensors"]
        with torch.no_grad():
            learner.lm_head.weight += 1
    if memory:
        Path(manifest.path).unlink()
        folder.rmdir()


def test_folders_of_killed_runs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A live run holds the lock of its folder. A folder without a lock stays: a run may be about to lock it."""
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path)
    killed, lock = files.locked_weights_folder(1)
    lock.close()
    alive, held = files.locked_weights_folder(1)
    assert not killed.exists()
    (tmp_path / "covey-weights-new").mkdir()
    mine, lock = files.locked_weights_folder(1)
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, mine.name, "covey-weights-new"}
    held.close()
    lock.close()


def test_files_of_other_users_are_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody can write to a machine's shared memory: a link there may point anywhere."""
    memory, precious = tmp_path / "memory", tmp_path / "precious"
    for folder in (memory / "covey-weights-linked", memory / "covey-weights-other", precious):
        folder.mkdir(parents=True)
        (folder / ".lock").write_text("kept")
    (memory / "covey-weights-link").symlink_to(precious)
    (memory / "covey-weights-linked" / ".lock").unlink()
    (memory / "covey-weights-linked" / ".lock").symlink_to(precious / ".lock")
    monkeypatch.setattr(files, "SHARED_MEMORY", memory)
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(memory))
    mine = files.os.getuid()
    monkeypatch.setattr(files.os, "getuid", lambda: mine + 1)
    files.locked_weights_folder(1)[1].close()
    assert (memory / "covey-weights-other" / ".lock").read_text() == "kept"
    monkeypatch.setattr(files.os, "getuid", lambda: mine)
    files.locked_weights_folder(1)[1].close()
    assert not (memory / "covey-weights-other").exists() and (precious / ".lock").read_text() == "kept"
    assert {path.name for path in memory.iterdir()} >= {"covey-weights-link", "covey-weights-linked"}
    with pytest.raises(OSError, match=r"symbolic links"):
        lock_folder(memory / "covey-weights-linked")


def test_a_damaged_or_missing_file_is_not_loaded(tmp_path: Path) -> None:
    manifest = write_weights(trained_weights(tiny_llama()), tmp_path, 3)
    path = Path(manifest.path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsDamaged, match=r"version 3: .* does not match its checksum"):
        read_weights(manifest, patience=0.1)
    path.unlink()
    with pytest.raises(WeightsDamaged, match="is not there"):
        read_weights(manifest, patience=0.1)


def test_a_reader_waits_for_a_late_file(tmp_path: Path) -> None:
    model = tiny_llama()
    manifest = write_weights(trained_weights(model), tmp_path, 0)
    hidden = Path(manifest.path).rename(tmp_path / "elsewhere")
    late = threading.Timer(0.3, lambda: hidden.rename(manifest.path))
    late.start()
    assert set(read_weights(manifest, patience=20)) == dict(trained_weights(model)).keys()
    late.join()


def test_adapters_are_sent_without_their_base() -> None:
    peft = pytest.importorskip("peft")

    def adapted(seed: int) -> Any:
        base = tiny_llama()
        torch.manual_seed(seed)
        return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))

    learner, engine = adapted(1), adapted(2)
    sent = dict(trained_weights(learner))
    assert len(sent) == 4 and all("lora_" in name for name in sent)  # two layers, A and B
    assert not same(learner, engine)
    load_weights(engine, sent)
    assert same(learner, engine)


def test_weights_of_another_model_are_rejected() -> None:
    engine, before = tiny_llama(seed=1), tiny_llama(seed=1)
    weights = dict(trained_weights(tiny_llama(seed=2, num_hidden_layers=1)))
    with pytest.raises(WeightsDamaged, match="another than the learner's"):
        load_weights(engine, weights)
    assert same(engine, before)


def test_by_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    """In buckets smaller than the model, then again in a new group, as after a replacement. Members are threads here;
    tests/cluster/test_ray.py has processes."""
    monkeypatch.setattr(buckets, "BUCKET", 20_000)
    learner = tiny_llama(seed=1).to(torch.bfloat16)
    assert sum(p.numel() * 2 for p in learner.parameters()) > 2 * bucket_size(learner)
    for seed in (2, 3):
        listener = listen("127.0.0.1")
        rendezvous = Rendezvous("127.0.0.1", listener.getsockname()[1], members=3, gpu=False)
        engines = [tiny_llama(seed=seed).to(torch.bfloat16) for _ in range(2)]
        with ThreadPoolExecutor(2) as threads:
            jobs = [threads.submit(receive, rendezvous, rank, engine) for rank, engine in enumerate(engines, start=1)]
            WeightGroup(rendezvous, 0, "127.0.0.1", listener).send(trained_weights(learner), bucket_size(learner))
            for job in jobs:
                job.result()
        assert all(same(learner, engine) for engine in engines)
        with torch.no_grad():
            learner.lm_head.weight += 1


def receive(rendezvous: Rendezvous, rank: int, engine: Any) -> None:
    load_weights(engine, WeightGroup(rendezvous, rank, "127.0.0.1").receive())


def test_in_process_the_module_must_be_the_learners_own() -> None:
    model = tiny_llama()
    assert asyncio.run(InProcessTransport().publish(model, 1, {0: model})) == {}
    with pytest.raises(AssertionError, match="shares the learner's module"):
        asyncio.run(InProcessTransport().publish(model, 1, {0: tiny_llama()}))
