"""TensorBoard event files, in FOLDER/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping

from covey.telemetry.base import RunInfo, Tracker, require
from covey.telemetry.history import History


class TensorboardSink(Tracker):
    def __init__(self, info: RunInfo, history: History) -> None:
        folder = info.folder / "tensorboard"
        resumed = folder.exists()
        self._writer = require("torch.utils.tensorboard", "tensorboard").SummaryWriter(
            log_dir=str(folder), purge_step=info.first_step if resumed else None
        )
        # Purging also hides the evaluation made at the checkpoint itself, which is part of the record.
        for record in history.evaluations:
            if resumed and record.step >= info.first_step:
                self.log(record.step, record.metrics)

    def close(self, status: str) -> None:
        self._writer.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()
