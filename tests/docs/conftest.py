from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.docs import workplace


@pytest.fixture(autouse=True)
def one_thread(one_thread_count: None) -> None:
    torch.set_num_threads(1)  # threads of a model this small wait for each other


@pytest.fixture(scope="session")
def furnished(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("furnished")
    workplace.furnish(folder, tiny_model_folder)
    return folder


@pytest.fixture
def place(furnished: Path, tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a command or a block runs, which is the working folder too."""
    workplace.enter(furnished, tmp_path, tiny_model_folder, monkeypatch)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # `python` is this one
    return tmp_path
