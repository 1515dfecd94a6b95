"""The engine that rollout=auto chooses, and the required version of vLLM."""

from __future__ import annotations

import re
from typing import Any

import pytest

from covey.app import checks as module
from covey.app.checks import choose_engine, require_vllm
from covey.errors import Absent
from covey.imports import install_extra

LARGE_AND_LONG = {"installed": True, "gpu": True, "parameters": 7.6e9, "max_tokens": 8192}


@pytest.mark.parametrize(
    ("changes", "engine", "because"),
    [
        ({}, "vllm", "7.6B parameters and answers of up to 8192"),
        ({"parameters": 1.5e9}, "embedded", "1.5B parameters"),
        ({"max_tokens": 1024}, "embedded", "up to 1024 tokens"),
        ({"gpu": False}, "embedded", "CPU"),
        ({"installed": False}, "embedded", "not installed"),
        ({"parameters": 1e9, "max_tokens": 8, "tensor_parallel": 2}, "vllm", "tensor_parallel=2"),
        ({"installed": False, "tensor_parallel": 2}, "vllm", "tensor_parallel=2"),
    ],
)
def test_the_choice_and_its_reason(changes: dict[str, Any], engine: str, because: str) -> None:
    name, reason = choose_engine(**(LARGE_AND_LONG | changes))
    assert name == engine and because in reason


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, re.escape(install_extra("vllm"))),
        ("0.9.2", r"0\.24 or newer, found 0\.9\.2"),
        ("0.23.9", "0.24 or newer"),
    ],
)
def test_missing_or_old_vllm_is_an_error(monkeypatch: pytest.MonkeyPatch, version: str | None, message: str) -> None:
    monkeypatch.setattr(module, "vllm_version", lambda: version)
    with pytest.raises(Absent, match=message):
        require_vllm()


@pytest.mark.parametrize("version", ["0.24.0", "0.32.0+cpu", "1.0.0"])
def test_vllm_that_is_new_enough_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(module, "vllm_version", lambda: version)
    require_vllm()
