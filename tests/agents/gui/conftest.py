"""Browsers of these tests have their files in a folder of this process, so that tests see only their own processes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def folder_of_browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    tmp_path_factory.getbasetemp()  # made before: it is for all tests
    before, tempfile.tempdir = tempfile.tempdir, tempfile.mkdtemp(prefix="gui-", dir="/tmp")
    yield
    shutil.rmtree(tempfile.tempdir, ignore_errors=True)
    tempfile.tempdir = before
