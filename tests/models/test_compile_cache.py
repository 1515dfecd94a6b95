"""Compiled code is kept in Covey's own cache, by version, unless the environment names another place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from covey.cli.doctor import examine
from covey.models.builtin import compile_cache, keep_compiled_code

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def test_the_folder_is_of_these_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path))
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(compile_cache() / "inductor")
    assert compile_cache().parent == tmp_path / "compiled" and f"torch-{torch.__version__}" in compile_cache().name
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"]  # torch reads it


def test_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, str(tmp_path / name))
    keep_compiled_code()
    assert [os.environ[name] for name in NAMES] == [str(tmp_path / name) for name in NAMES]
    (tmp_path / NAMES[0]).mkdir()
    (tmp_path / NAMES[0] / "kernel").write_bytes(bytes(3 * 2**20))
    found = next(finding for finding in examine() if finding.what == "compiled code")
    assert found.detail == f"3 MiB, kept between runs in {tmp_path / NAMES[0]}"
