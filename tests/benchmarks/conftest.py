"""The scripts of benchmarks/ import each other as they do when they are run."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.conftest import furnished, place  # noqa: F401  (fixtures)

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


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, tiny_model_folder: Path) -> None:
    """Sides run here, not in processes of their own: importing torch takes longer than all of this. The built-in model
    is a tiny one."""
    from kit import child

    def run(self: Any, side: str, settings: Any, python: Any = None) -> Any:
        script = importlib.import_module(Path(self.script).stem)
        sides = {"machine": script.machine} if side == "machine" else {side: getattr(script, f"{side}_side")}
        return json.loads(json.dumps(sides[side](json.loads(json.dumps(settings)))))

    monkeypatch.setattr(child.Children, "run", run)
    monkeypatch.setattr("covey.models.loading.builtin_folder", lambda name: tiny_model_folder)
