"""What the configuration tests share: the real algorithms, and a way to compose words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from covey.algorithms import ALGORITHMS as CATALOGUE
from covey.algorithms import schema
from covey.config import Composed, compose

ALGORITHMS: dict[str, type] = {name: schema(name) for name in CATALOGUE}

Compose = Callable[..., Composed]


@pytest.fixture
def algorithms() -> dict[str, type]:
    return ALGORITHMS


@pytest.fixture
def run(tmp_path: Path) -> Compose:
    """run("key=value", …, file="YAML text")"""

    def compose_command(*words: str, file: str | None = None, **options: object) -> Composed:
        path = None
        if file is not None:
            path = tmp_path / "my.yaml"
            path.write_text(file)
        return compose(words, algorithms=ALGORITHMS, config_path=path, **options)  # type: ignore[arg-type]

    return compose_command
