"""covey export: what is written says what the trained model said, and mistakes are named before anything is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.cli.main import main
from covey.config.schema import LearnerConfig
from covey.learner.learner import Learner
from covey.training.checkpoint import CheckpointStore
from tests.conftest import byte_tokenizer


def run_with(tmp_path: Path, model: Any) -> Path:
    """A run's folder with two checkpoints, of which the first is the best."""
    run = tmp_path / "run"
    store = CheckpointStore(run / "checkpoints", keep_last=2, keep_best=True)
    learner = Learner(model, LearnerConfig(), total_updates=1)
    store.save(1, learner, byte_tokenizer(), {"best": {"step": 1, "value": 1.0}})
    with torch.no_grad():
        for weight in learner.optimizer.working.values():
            weight.add_(0.1)
    store.save(2, learner, byte_tokenizer(), {"best": {"step": 1, "value": 1.0}})
    (run / "run.json").write_text("{}")
    return run


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(3, 30)[None]).logits
    return found.float()


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def adapted(folder: Path, scale: float = 1.0) -> Any:
    torch.manual_seed(3)
    model = peft.get_peft_model(
        loaded(folder), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=scale)
    return model.eval()


def test_a_run_gives_its_best_weights(tmp_path: Path, tiny_model_folder: Path) -> None:
    expected = logits_of(loaded(tiny_model_folder))
    run, out = run_with(tmp_path, loaded(tiny_model_folder)), tmp_path / "new" / "out"
    assert main(["export", str(run), str(out)]) == 0
    assert torch.equal(logits_of(loaded(out)), expected)
    assert AutoTokenizer.from_pretrained(out)("a1")["input_ids"] == byte_tokenizer()("a1")["input_ids"]
    assert main(["export", str(run / "checkpoints" / "step-000002"), str(tmp_path / "second")]) == 0
    assert not torch.allclose(logits_of(loaded(tmp_path / "second")), expected, atol=0.1)


def test_another_precision(tmp_path: Path, tiny_model_folder: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", str(tiny_model_folder), str(out), "--dtype", "bfloat16"]) == 0
    whole, half = (load_file(folder / "model.safetensors") for folder in (tiny_model_folder, out))
    assert all(torch.equal(half[name], weight.bfloat16()) for name, weight in whole.items())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_adapter_is_merged_unless_it_is_asked_for(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An ordinary model folder, which transformers loads without peft; or the adapter alone."""
    model = adapted(tiny_model_folder)
    expected = logits_of(model)
    assert not torch.allclose(expected, logits_of(loaded(tiny_model_folder)), atol=0.1)
    run, merged, adapter = run_with(tmp_path, model), tmp_path / "merged", tmp_path / "adapter"
    assert main(["export", str(run), str(merged)]) == 0
    told = capsys.readouterr().out
    assert not list(merged.glob("adapter*"))
    torch.testing.assert_close(logits_of(loaded(merged)), expected, atol=1e-3, rtol=1e-4)
    count = sum(weight.numel() for weight in load_file(merged / "model.safetensors").values())
    assert f"{merged}\n  a whole model: the adapter is merged into {tiny_model_folder}" in told
    assert f"{count:,} weights in float32" in told
    assert main(["export", str(run), str(adapter), "--adapter"]) == 0
    again = peft.PeftModel.from_pretrained(loaded(tiny_model_folder), adapter).eval()
    torch.testing.assert_close(logits_of(again), expected, atol=1e-5, rtol=1e-5)
    whole = load_file(adapter / "adapter_model.safetensors")
    told = capsys.readouterr().out
    assert f"{adapter}\n  an adapter for {tiny_model_folder}, which programs load beside it" in told
    assert f"{sum(weight.numel() for weight in whole.values()):,} weights in float32" in told
    assert main(["export", str(run), str(tmp_path / "half"), "--adapter", "--dtype", "bfloat16"]) == 0
    half = load_file(tmp_path / "half/adapter_model.safetensors")
    assert all(torch.equal(half[name], weight.bfloat16()) for name, weight in whole.items())


def test_an_adapter_without_its_model_can_only_stay_one(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_model_folder, tmp_path / "base")
    run = run_with(tmp_path, adapted(tmp_path / "base"))
    shutil.rmtree(tmp_path / "base")
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "base") in error and "--adapter writes the adapter alone" in error
    assert not (tmp_path / "out").exists()
    assert main(["export", str(run), str(tmp_path / "out"), "--adapter"]) == 0


def test_a_whole_model_is_described(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tiny_model_folder), str(tmp_path / "out")]) == 0
    count = sum(weight.numel() for weight in load_file(tmp_path / "out/model.safetensors").values())
    assert f"out\n  a whole model, {count:,} weights in float32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "out"], "there is no folder nowhere"),
        (["MODEL"], "name a checkpoint or a run"),
        (["empty", "out"], "config.json is missing"),
        (["MODEL", "full"], "full already exists"),
        (["MODEL", "out", "--dtype", "int4"], "--dtype must be one of float32, bfloat16, float16"),
        (["MODEL", "out", "--adapter"], "has no adapter"),
        (["MODEL", "out", "--adaptor"], "did you mean   --adapter?"),
        (["begun", "out"], "has no checkpoint yet"),
    ],
)
def test_mistakes(
    tmp_path: Path,
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "full", "begun"):
        Path(name).mkdir()
    Path("full/notes.txt").write_text("mine")
    Path("begun/run.json").write_text("{}")
    assert main(["export", *(str(tiny_model_folder) if word == "MODEL" else word for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists() and [p.name for p in Path("full").iterdir()] == ["notes.txt"]


def test_a_damaged_checkpoint_is_refused(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(tmp_path, loaded(tiny_model_folder))
    shutil.copy(tiny_model_folder / "config.json", run / "checkpoints" / "step-000001" / "state.json")
    assert main(["export", str(run / "checkpoints" / "step-000001"), str(tmp_path / "out")]) == 2
    assert "state.json does not match its checksum" in capsys.readouterr().err
