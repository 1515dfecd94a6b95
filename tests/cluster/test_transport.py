"""Weights that arrive are those that were sent, or nobody samples with them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from covey.cluster import transport
from covey.cluster.transport import (
    Meeting,
    WeightGroup,
    WeightsDamaged,
    free_port,
    load_weights,
    read_notice,
    remove_older,
    trained_weights,
    write_notice,
)
from covey.rollout.vllm.weights import weights_folder
from tests.conftest import tiny_llama


def same(model: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("memory", [False, True])
def test_by_file_on_disk_and_in_memory(tmp_path: Path, memory: bool) -> None:
    folder = weights_folder(10**6) if memory else tmp_path
    learner, engine = tiny_llama(seed=1), tiny_llama(seed=2)
    for version in (0, 1):
        notice = write_notice(trained_weights(learner), folder, version)
        load_weights(engine, read_notice(notice, patience=0))
        remove_older(folder, version)
        assert same(learner, engine)
        assert [path.name for path in folder.iterdir()] == [f"version-{version}.safetensors"]
        with torch.no_grad():
            learner.lm_head.weight += 1
    if memory:
        Path(notice.path).unlink()
        folder.rmdir()


def test_a_file_that_was_damaged_or_never_came_is_not_taken(tmp_path: Path) -> None:
    notice = write_notice(trained_weights(tiny_llama()), tmp_path, 3)
    path = Path(notice.path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsDamaged, match=r"version 3: .* does not match its checksum"):
        read_notice(notice, patience=0.1)
    path.unlink()
    with pytest.raises(WeightsDamaged, match="is not there"):
        read_notice(notice, patience=0.1)


def test_a_file_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    model = tiny_llama()
    notice = write_notice(trained_weights(model), tmp_path, 0)
    hidden = Path(notice.path).rename(tmp_path / "elsewhere")
    late = threading.Timer(0.3, lambda: hidden.rename(notice.path))
    late.start()
    assert set(read_notice(notice, patience=20)) == dict(trained_weights(model)).keys()
    late.join()


def test_adapters_travel_without_their_base() -> None:
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


def test_another_model_is_refused_as_a_whole() -> None:
    engine, before = tiny_llama(seed=1), tiny_llama(seed=1)
    weights = dict(trained_weights(tiny_llama(seed=2, num_hidden_layers=1)))
    with pytest.raises(WeightsDamaged, match="another than the learner's"):
        load_weights(engine, weights)
    assert same(engine, before)


def test_by_broadcast_between_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In buckets smaller than the model; then once more in a new group, as after a replacement."""
    monkeypatch.setattr(transport, "BUCKET", 20_000)
    learner = tiny_llama(seed=1).to(torch.bfloat16)
    assert sum(p.numel() * 2 for p in learner.parameters()) > 40_000
    for attempt in (0, 1):
        meeting = Meeting("127.0.0.1", free_port("127.0.0.1"), members=2, gpu=False)
        other = multiprocessing.get_context("spawn").Process(target=receive, args=(meeting, tmp_path / f"{attempt}"))
        other.start()
        group = WeightGroup(meeting, 0, "127.0.0.1")
        group.send(trained_weights(learner))
        other.join(60)
        assert other.exitcode == 0
        found = torch.load(tmp_path / f"{attempt}")
        engine = tiny_llama(seed=2).to(torch.bfloat16)
        load_weights(engine, found)
        assert same(learner, engine)


def receive(meeting: Meeting, path: Path) -> None:
    torch.save(WeightGroup(meeting, 1, "127.0.0.1").receive(), path)
