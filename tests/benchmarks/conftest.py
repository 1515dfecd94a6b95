"""The scripts of benchmarks/ import each other as they do when they are run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(scope="session", autouse=True)
def importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(autouse=True)
def one_thread(one_thread_count: None) -> None:
    """Threads of a model this small wait for each other, on a busy machine for seconds."""
    torch.set_num_threads(1)
