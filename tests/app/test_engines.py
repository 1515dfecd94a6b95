"""Choosing an engine from the command line, and whole runs with another worker in vLLM's place."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from covey.algorithms import algorithm_schemas
from covey.app import checks
from covey.app.prepare import Prepared, prepare
from covey.cli import doctor
from covey.cli.main import main
from covey.config import compose
from covey.errors import Absent, InputError, RunFailed
from covey.imports import install_extra
from tests.cli.test_algorithms import REWARDS, SMALL
from tests.rollout.no_vllm import without_vllm


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARDS)


def prepared(model: Path, *words: str) -> Prepared:
    return prepare(compose([f"model={model}", *SMALL, *words], algorithms=algorithm_schemas()))


def metrics() -> list[dict[str, float]]:
    (run,) = Path("outputs").glob("*/*")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["metrics"] for record in records if record["kind"] == "step"]


def test_vllm_that_is_missing_stops_before_the_model_loads(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("covey.app.checks.vllm_version", lambda: None)
    assert main(["train", f"model={tiny_model_folder}", *SMALL, "rollout=vllm"]) != 0
    assert install_extra("vllm") in capsys.readouterr().err
    assert not Path("outputs").exists()
    assert main(["train", "--validate-only", f"model={tiny_model_folder}", *SMALL, "rollout=vllm"]) == 0
    assert "not on this machine: rollout=vllm needs vLLM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rollout.tensor_parallel=2"], r"tensor_parallel=2: the embedded engine(.|\n)*use rollout=vllm"),
        (["rollout=vllm", "rollout.devices=[0,1]"], r"devices=\[0, 1\] and rollout.tensor_parallel=1"),
        (["rollout=vllm", "rollout.devices=[0,0]", "rollout.tensor_parallel=2"], "give that number of devices"),
        (["rollout=vllm", "rollout.tensor_parallel=2", "model.device=cpu"], "the model runs on the CPU"),
        (["rollout=vllm", "rollout.devices=[99]"], r"GPUs 99, but torch sees \d+ GPUs"),
    ],
)
def test_what_an_engine_cannot_follow_is_refused(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    without_vllm(monkeypatch)
    with pytest.raises(InputError, match=told):
        prepared(tiny_model_folder, *words)


@pytest.mark.parametrize("setting", ["rollout.devices=[0]", "learner.offload_weights=true"])
def test_settings_without_effect_on_the_embedded_engine_are_said(tiny_model_folder: Path, setting: str) -> None:
    found = prepared(tiny_model_folder, setting)
    assert any(text.startswith(f"{setting.partition('=')[0]} has no effect") for text in found.warnings)


@pytest.mark.parametrize(
    ("words", "offloads"),
    [
        (["rollout=embedded"], False),
        (["rollout=vllm", "rollout.devices=[1]"], False),
        (["rollout=vllm"], True),
        (["rollout=embedded", "cluster=ray"], True),
        (["rollout=vllm", "cluster=ray", "cluster.rollout_devices=1"], False),
    ],
)
def test_weights_are_offloaded_only_for_an_engine_of_its_own_on_the_same_gpu(
    monkeypatch: pytest.MonkeyPatch, words: list[str], offloads: bool
) -> None:
    monkeypatch.setattr("covey.models.loading.pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = compose([*words, "learner.offload_weights=true"], algorithms=algorithm_schemas()).config
    resolved, warnings = checks.resolve_offload(config)
    assert resolved.learner.offload_weights == offloads
    assert ["learner.offload_weights has no effect" in text for text in warnings] == [True] * (not offloads)


def test_gpus_are_the_learners_and_those_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.models.loading.pick_device", lambda name: torch.device(name))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    def gpus(*words: str) -> tuple[tuple[int, ...], bool]:
        config = compose(["rollout=vllm", *words], algorithms=algorithm_schemas()).config
        found = checks.engine_gpus(config)
        return found, checks.shares_gpu(config, found)

    assert gpus("model.device=cuda") == ((0,), True)
    assert gpus("model.device=cuda:1", "rollout.tensor_parallel=3") == ((1, 2, 3), True)
    assert gpus("model.device=cuda:1", "rollout.devices=[2]") == ((2,), False)
    assert gpus("model.device=cpu") == ((), False)
    with pytest.raises(Absent, match="GPUs 3, 4, but torch sees 4"):
        gpus("model.device=cuda:3", "rollout.tensor_parallel=2")


def test_auto_chooses_and_says_why(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = prepared(tiny_model_folder, "rollout=auto", "model.device=cpu")
    assert (found.config.rollout.name, found.engine_reason) == ("embedded", "the faster engine on a CPU")
    assert found.tree["rollout"]["name"] == "auto"  # another machine may choose otherwise
    words = ["train", f"model={tiny_model_folder}", *SMALL, "rollout=auto", "model.device=cpu"]
    assert main([*words, "--validate-only"]) == 0
    assert "engine     embedded: the faster engine on a CPU" in capsys.readouterr().out
    assert main(words) == 0
    assert "rollout=embedded: the faster engine on a CPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "correction"),
    [
        (["algorithm=grpo"], "none"),
        (["algorithm=grpo", "rollout=vllm"], "token"),
        (["algorithm=grpo", "rollout.top_p=0.9"], "token"),
        (["algorithm=grpo", "rollout=vllm", "algorithm.correction=none"], "none"),
        (["algorithm=grpo", "rollout=vllm", "algorithm.correction=sequence"], "sequence"),
    ],
)
def test_samples_of_another_engine_are_corrected_for(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], correction: str
) -> None:
    without_vllm(monkeypatch)
    found = prepared(tiny_model_folder, *words)
    assert found.algorithm.correction.correction == correction
    assert found.algorithm.needs.proximal == (correction != "none")
    uncorrected = "rollout=vllm" in words and correction == "none"
    assert any("vllm's log-probs differ" in text for text in found.warnings) == uncorrected


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("algorithm=gvpo", marks=pytest.mark.slow),
        "algorithm=grpo",
        pytest.param("algorithm=grpo model.lora.rank=4 algorithm.correction=none", marks=pytest.mark.slow),
    ],
)
def test_a_training_whose_engine_has_weights_of_its_own(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """Each step samples with the weights that the step before made: the engine's log-probs are the learner's."""
    without_vllm(monkeypatch)
    several = ["learner.mini_batch_size=1", "eval.after=true", "learner.lr=0.01"]
    assert main(["train", f"model={tiny_model_folder}", *SMALL, "rollout=vllm", *several, *words.split()]) == 0
    assert len(metrics()) == 2
    for step in metrics():
        assert 0 <= step["rollout/mismatch"] < 1e-4
        assert 0 <= step["rollout/kl"] < 1e-6
        assert step["perf/generated_tokens"] > 0
        assert ("correction/mismatch" in step) == (words == "algorithm=grpo")
    (log,) = Path("outputs").glob("*/*/vllm.log")
    loaded = re.findall(r"load_file (version-\d)", log.read_text())
    assert loaded == ["version-0", "version-1", "version-2"]


def test_a_model_is_evaluated_with_vllm(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy answers, so the same figures as with the embedded engine."""
    without_vllm(monkeypatch)
    figures = []
    for engine in ("embedded", "vllm"):
        words = [f"rollout={engine}", "rollout.max_tokens=8", "data.val_size=4", "reward=rewards.py:variety"]
        assert main(["eval", str(tiny_model_folder), *words]) == 0
        figures.append(capsys.readouterr().out)
    assert "eval/greedy/variety" in figures[0] and figures[0] == figures[1]


def test_a_worker_that_dies_ends_the_run_with_its_last_words(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_vllm(monkeypatch, "dies")
    found = prepared(tiny_model_folder, "rollout=vllm")
    from covey.app.train import run_to_end

    with pytest.raises(RunFailed, match=r"vLLM's process has ended\n(.|\n)*the last words(.|\n)*vllm.log"):
        run_to_end(found)
    (info,) = Path("outputs").glob("*/*/run.json")
    assert json.loads(info.read_text())["status"] == "failed"


@pytest.mark.parametrize(("version", "mark"), [(None, "--"), ("0.9.0", "--"), ("0.24.0", "ok")])
def test_the_doctor_says_whether_vllm_is_here(monkeypatch: pytest.MonkeyPatch, version: str | None, mark: str) -> None:
    monkeypatch.setattr("covey.app.checks.vllm_version", lambda: version)
    (found,) = (finding for finding in doctor.examine() if finding.what == "vllm")
    assert found.mark == mark and (version or "no") in found.detail
    assert (" -m pip install " in found.fix) == (mark == "--")
