"""Two algorithms to configure, so that these tests need no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from covey.config import Composed, compose


@dataclass(frozen=True)
class Gvpo:
    name: str = "gvpo"
    beta: float = 0.1  # strength of the KL to the reference
    use_bessel_correction: bool = True  # divide by k - 1
    clip_weight: float | None = None  # bound on the weights
    normalize_weights: bool = True
    reference: str = "initial"


@dataclass(frozen=True, slots=True)
class Grpo:
    name: str = "grpo"
    std_normalize: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    aggregation: str = "seq-mean-token-mean"
    kl_coef: float = 0.0
    kl_estimator: str = "k3"


ALGORITHMS: dict[str, type] = {"gvpo": Gvpo, "grpo": Grpo}

Compose = Callable[..., Composed]


@pytest.fixture
def algorithms() -> dict[str, type]:
    return ALGORITHMS


@pytest.fixture
def run(tmp_path: Path) -> Compose:
    """run("key=value", …, file="YAML text")"""

    def compose_words(*words: str, file: str | None = None, **options: object) -> Composed:
        path = None
        if file is not None:
            path = tmp_path / "my.yaml"
            path.write_text(file)
        return compose(words, algorithms=ALGORITHMS, config_path=path, **options)  # type: ignore[arg-type]

    return compose_words
