"""Benchmarks of a fixed length: no token ends an answer, on the host and in captured steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def kit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_engines_of_fixed_lengths_know_no_end() -> None:
    from kit.pipeline import Sampler

    assert sys.modules["kit"].__file__ == str(BENCHMARKS / "kit/__init__.py")
    sampler = Sampler({"model": "tiny", "device": "cpu", "dtype": "float32"}, max_sequences=2)
    try:
        sampler.engine.paged = True
        assert not sampler.engine.eos_ids
        assert not list(sampler.engine._empty_batch().eos_ids)
    finally:
        sampler.close()
