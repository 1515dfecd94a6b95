from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.here import Nest, Yard, crashed


@pytest.fixture(scope="session")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    base = tmp_path_factory.mktemp("yard")
    inputs = crashed.prepare(base / "inputs")
    with Nest() as nest:
        yield Yard(nest, inputs, base)
