"""Runs with rollout=vllm on machines without vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FAKE = str(Path(__file__).with_name("fake_worker.py"))


def without_vllm(patch: pytest.MonkeyPatch, mode: str = "") -> None:
    """From now on rollout=vllm starts the worker in fake_worker.py, whether vLLM is installed or not."""
    from covey.app import checks
    from covey.rollout.vllm import engine

    patch.setattr(checks, "require_vllm", lambda: None)
    patch.setattr(engine, "WORKER", (sys.executable, FAKE, *([mode] if mode else [])))
