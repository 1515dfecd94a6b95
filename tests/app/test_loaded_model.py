"""A model that is asked and not trained: covey eval, sample and serve."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from covey.app.loaded_model import load_model, prepare_model
from covey.app.run_files import threads_for
from covey.cli.parse import parse
from covey.config.schema import Config


def test_as_many_threads_as_asked_for(tiny_model_folder: Path) -> None:
    for threads in (1, 2):
        bench = load_model(
            prepare_model(parse([str(tiny_model_folder), f"loop.threads={threads}"]), "", needs_tasks=False)
        )
        bench.engine.close()
        bench.resources.close()
        assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("variable", "asked", "expected"), [("1", None, 1), ("3", None, 3), ("3", 2, 2), ("", None, 0)]
)
def test_threads_of_a_new_run(monkeypatch: pytest.MonkeyPatch, variable: str, asked: int | None, expected: int) -> None:
    """loop.threads, else OMP_NUM_THREADS, else one per core."""
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    config = replace(Config(), loop=replace(Config().loop, threads=asked))
    assert threads_for(config, None) == (expected or len(os.sched_getaffinity(0)))
