"""Fixtures: engines configured as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from covey.rollout.embedded import EmbeddedEngine, attention, gpu_batch
from tests.rollout.plain import engine_for
from tests.rollout.triton_support import CAN_RUN_TRITON, DEVICE

MakeEngine = Callable[..., EmbeddedEngine]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Engines that decode with graphs; `blocks` bounds their cache. Not compiled, unless asked. Without a GPU a
    stand-in replays the step instead of a captured graph: everything but the capture is what a GPU would run."""
    if DEVICE.type == "cpu":
        _without_capture(monkeypatch)

    def make(model: Any, *, blocks: int = 1000, compiled: bool = False, **options: Any) -> EmbeddedEngine:
        monkeypatch.setattr(gpu_batch, "cache_tokens", lambda *_: blocks * gpu_batch.BLOCK)
        return engine_for(model, compiled=compiled, paged=True, **options)

    return make


def _without_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CAN_RUN_TRITON:
        return  # only eager engines can be made here
    from covey.rollout.embedded.graphs import GraphRunner

    def capture(self: Any, step: Any, run: Callable[[], torch.Tensor]) -> SimpleNamespace:
        captured = SimpleNamespace()

        def replay() -> None:
            with attention.engine_attention(self.model, step), self.fused.active():
                captured.logits = run()

        captured.replay = replay
        return captured

    monkeypatch.setattr(GraphRunner, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=1))
