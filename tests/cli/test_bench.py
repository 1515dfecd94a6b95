"""A model that is asked and not trained: covey eval, sample and serve."""

from __future__ import annotations

from pathlib import Path

import torch

from covey.cli.bench import open_bench
from covey.cli.words import parse


def test_as_many_threads_as_asked_for(tiny_model_folder: Path) -> None:
    for threads in (1, 2):
        bench = open_bench(parse([str(tiny_model_folder), f"loop.threads={threads}"]), "", asks_tasks=False)
        bench.engine.close()
        bench.resources.close()
        assert torch.get_num_threads() == threads
