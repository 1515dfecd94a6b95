from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.crashes import CrashHarness, Nest, crashed


@pytest.fixture(scope="session")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashHarness]:
    base = tmp_path_factory.mktemp("harness")
    inputs = crashed.prepare(base / "inputs")
    with Nest() as nest:
        yield CrashHarness(nest, inputs, base)
