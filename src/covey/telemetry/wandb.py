"""Weights & Biases. `WANDB_MODE=offline` keeps everything in the run folder until `wandb sync`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from covey.config.schema import LoggingConfig
from covey.telemetry.base import EpisodeView, RunInfo, Sink, require

ID_FILE = "wandb_run_id"


class WandbSink(Sink):
    def __init__(self, info: RunInfo, logging: LoggingConfig) -> None:
        self._run = require("wandb", "wandb").init(
            project=logging.project,
            name=logging.experiment,
            id=_run_id(info),
            resume="allow",
            dir=str(info.folder),
            config=info.config,
        )
        # W&B's own counter only moves forward; a run that fell back to its checkpoint repeats steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def step(
        self,
        index: int,
        metrics: Mapping[str, float],
        sample: EpisodeView | None,
        episodes: Sequence[Mapping[str, Any]],
    ) -> None:
        self._run.log({**metrics, "step": index})

    def evaluation(self, step: int, metrics: Mapping[str, float], sample: EpisodeView | None) -> None:
        self._run.log({**metrics, "step": step})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


def _run_id(info: RunInfo) -> str:
    """The id in the run's folder, so that a resumed run continues the same page."""
    path = info.folder / ID_FILE
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8] + "\n", encoding="ascii")
    return path.read_text(encoding="ascii").strip()
