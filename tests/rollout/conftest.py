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
    from covey.rollout.embedded.graphs import GraphDecoder, GraphStep
    from covey.rollout.embedded.kernels import splits_for

    def capture(self: Any, size: int, draws: bool) -> tuple[Any, torch.Tensor]:
        logits_BV = torch.zeros(size, self.model.config.vocab_size)
        splits = splits_for(size, self.cache.keys.shape[2], self.processors)
        step = GraphStep(self.cache, self.table_BN[:size], self.position_B[:size], splits)

        def replay() -> None:
            with attention.engine_attention(self.model, step), self.fused.active():
                logits_BV.copy_(self._step(size, draws))

        return SimpleNamespace(replay=replay), logits_BV

    monkeypatch.setattr(GraphDecoder, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=1))
