"""Weights & Biases. `WANDB_MODE=offline` keeps everything in the run folder until `wandb sync`."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from covey.config.schema import LoggingConfig
from covey.redact import hide_words
from covey.telemetry.base import RunInfo, Tracker, lasting_id, require

ID_FILE = "wandb_run_id"


class WandbSink(Tracker):
    elsewhere = True

    def __init__(self, info: RunInfo, logging: LoggingConfig) -> None:
        begins = not (info.folder / ID_FILE).exists()  # a resumed run keeps the labels that were changed on its page
        self._run = require("wandb", "wandb").init(
            project=logging.project,
            name=logging.experiment,
            id=lasting_id(info.folder / ID_FILE),
            resume="allow",
            dir=str(info.folder),
            config=info.config,
            tags=(logging.tags or None) if begins else None,
            notes=(logging.notes or None) if begins else None,
            settings={"x_disable_meta": True} if hide_words(sys.argv) != sys.argv else None,  # it records the command
        )
        # W&B's own counter only moves forward; a run that fell back to its checkpoint repeats steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
