"""Weights for vLLM: names, merged adapters, tied matrices, files and buckets."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from covey.errors import InputError
from covey.weights import files, vllm
from covey.weights.buckets import buckets, unpacked
from covey.weights.files import file_digest, write_weights
from covey.weights.names import named_weights
from tests.conftest import tiny_llama
from tests.learner.test_forward import family

peft = pytest.importorskip("peft")


def with_adapter(model: Any, **changes: Any) -> Any:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | changes
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_()
    return model


def test_names_are_those_of_model_files(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    found = dict(named_weights(model))
    assert set(found) == set(saved)
    assert all(torch.equal(found[name], saved[name]) for name in saved)


@pytest.mark.parametrize(
    ("name", "adapted"),
    [("qwen3_moe", False), ("qwen3_moe", True), ("mixtral", False), ("granitemoe", False), ("glm4_moe", True)],
)
def test_experts_and_buffers_are_those_of_model_files(tmp_path: Path, name: str, adapted: bool) -> None:
    """transformers fuses the experts of these files, and GLM's router has a bias that is not trained."""
    model = family(name)
    for buffer in model.buffers():
        buffer.uniform_()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    if adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    found = dict(named_weights(model))
    assert set(found) == set(saved)
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_a_tied_matrix_is_sent_once() -> None:
    names = [name for name, _ in named_weights(tiny_llama(tie_word_embeddings=True))]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert len(names) == len(set(names))


@torch.no_grad()
def test_adapters_are_merged_into_copies() -> None:
    """A plain model with the merged weights has the logits of the model with its adapter, which is not changed."""
    policy = with_adapter(tiny_llama())
    before = copy.deepcopy(policy.state_dict())
    plain = tiny_llama(seed=5)
    missing, unknown = plain.load_state_dict(dict(named_weights(policy)), strict=False)
    assert not missing and not unknown
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(plain(ids).logits, policy(ids).logits, atol=1e-3, rtol=1e-4)
    assert not torch.allclose(plain(ids).logits, tiny_llama()(ids).logits, atol=0.1)  # the adapter matters
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())


@torch.no_grad()
def test_modules_to_save_are_sent_under_their_own_name() -> None:
    policy = with_adapter(tiny_llama(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    policy.base_model.model.lm_head.modules_to_save["default"].weight.fill_(0.25)
    found = dict(named_weights(policy))
    assert set(found) == {name for name, _ in tiny_llama().named_parameters()}
    assert bool((found["lm_head.weight"] == 0.25).all())


def test_an_adapter_on_a_tied_matrix_is_rejected() -> None:
    policy = with_adapter(tiny_llama(tie_word_embeddings=True), target_modules=["embed_tokens"])
    with pytest.raises(InputError, match="this model ties the two"):
        list(named_weights(policy))


def test_an_adapter_of_another_kind_is_rejected() -> None:
    with pytest.raises(InputError, match="plain LoRA"):
        list(named_weights(with_adapter(tiny_llama(), use_dora=True)))


def test_a_file_is_whole_and_has_a_checksum(tmp_path: Path) -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    manifest = write_weights(named_weights(model), tmp_path, 7)
    path, digest = Path(manifest.path), manifest.digest
    assert path.name == "version-7.safetensors" and [*tmp_path.iterdir()] == [path]
    assert file_digest(path) == digest
    found = load_file(path)
    assert all(torch.equal(found[name], weight) for name, weight in model.named_parameters())


def test_a_file_of_a_killed_run_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path)
    seen = []

    async def call(command: str, **arguments: Any) -> None:
        seen.append(Path(arguments["path"]).parent)
        raise RuntimeError("vLLM died")

    killed, alive, mine = (vllm.VllmFileTransport() for _ in range(3))
    for transport in (killed, alive, mine):
        with pytest.raises(RuntimeError, match="vLLM died"):
            asyncio.run(transport.publish(tiny_llama(), 1, {0: call}))
        if transport is killed:
            assert transport._lock is not None
            transport._lock.close()  # as the end of its process does
    assert [folder.exists() for folder in seen] == [False, True, True]
    for transport in (alive, mine):
        transport.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [8192, 20_000, 1 << 20])
def test_buckets_hold_every_weight_bit_for_bit(size: int) -> None:
    """The buffer is overwritten for each layout; weights read before must not change."""
    model = tiny_llama(dtype=torch.bfloat16)
    model.model.norm.float()  # types may differ within a model
    buffer = torch.empty(size, dtype=torch.uint8)
    found = {}
    count = 0
    for layout in buckets(named_weights(model), buffer):
        found |= dict(unpacked(buffer, layout))
        count += 1
    expected = dict(model.named_parameters())
    assert list(found) == list(expected)
    assert all(found[n].dtype == w.dtype and torch.equal(found[n], w) for n, w in expected.items())
    assert (count > 1) == (size < sum(w.numel() * w.element_size() for w in expected.values()))


@pytest.mark.parametrize("bucket", [20_000, 1 << 20])
def test_the_ipc_transport_sends_every_weight_between_begin_and_end(
    bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: the handle is the buffer itself, and the receiver unpacks it at once."""
    monkeypatch.setattr(vllm, "BUCKET", bucket)
    monkeypatch.setattr(vllm, "cuda_handle", lambda buffer: buffer)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    model, calls, found = tiny_llama(), list[str](), dict[str, torch.Tensor]()

    async def call(do: str, **arguments: Any) -> None:
        calls.append(do)
        if do == "load_bucket":
            found.update(unpacked(arguments["handle"], arguments["layout"]))

    assert asyncio.run(vllm.CudaIpcTransport().publish(model, 1, {0: call})) == {}
    assert calls[0] == "load_begin" and calls[-1] == "load_end" and set(calls[1:-1]) == {"load_bucket"}
    assert (len(calls) > 3) == (bucket == 20_000)
    expected = dict(model.named_parameters())
    assert set(found) == set(expected) and all(torch.equal(found[name], w) for name, w in expected.items())
