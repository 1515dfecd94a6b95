"""A package that is missing on this machine is a warning of --validate-only, and an error with --strict."""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.imports import install_extra
from tests.vision.tiny import drawn, vlm_folder

# module, extra, settings that need it
NEEDS = [
    ("peft", "lora", ["model.lora.rank=4"]),
    ("mcp", "mcp", ["agent=hf", "agent.tools=['mcp:stdio:server']"]),
    ("gymnasium", "gymnasium", ["agent=gymnasium", "agent.environment=FrozenLake-v1", "agent.train_roles=[user]"]),
    ("openenv", "openenv", ["agent=openenv", "agent.environment=http://localhost:1"]),
    ("verifiers", "verifiers", ["agent=verifiers", "agent.environment=gsm8k-v1"]),
]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def check_is_warned(words: list[str], extra: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--validate-only"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"not on this machine: .*{re.escape(install_extra(extra))}", out)
    assert "the settings are valid, but 1 thing is not on this machine" in out
    assert main([*words, "--validate-only", "--strict"]) == 2
    assert install_extra(extra) in capsys.readouterr().err
    assert main(words) == 2
    assert install_extra(extra) in capsys.readouterr().err
    assert not Path("outputs").exists()


@pytest.mark.parametrize(("module", "extra", "settings"), NEEDS, ids=[module for module, _, _ in NEEDS])
def test_a_missing_package_is_a_warning(
    module: str,
    extra: str,
    settings: list[str],
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # importing it fails
    check_is_warned(["train", f"model={tiny_model_folder}", *settings], extra, capsys)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_missing_pillow_is_a_warning(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = vlm_folder(tmp_path / "model", "qwen2_5_vl")
    image = f"data:image/png;base64,{base64.b64encode(drawn()).decode()}"
    row = {"question": "what is <image>?", "images": [image], "answer": "a"}
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    files = ["data.train_files=rows.jsonl", "data.val_files=rows.jsonl", "data.train_batch_size=1"]
    check_is_warned([command, f"model={model}", *files], "vision", capsys)
