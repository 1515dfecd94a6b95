"""Trackio: a database on this machine (where TRACKIO_DIR says), seen with `trackio show`."""

from __future__ import annotations

from collections.abc import Mapping

from covey.config.schema import LoggingConfig
from covey.telemetry.base import RunInfo, Tracker, lasting_id, require

ID_FILE = "trackio_run_id"


class TrackioSink(Tracker):
    elsewhere = True

    def __init__(self, info: RunInfo, logging: LoggingConfig) -> None:
        # Trackio knows a run by its name alone: the id tells runs of one experiment apart.
        name = f"{logging.experiment}-{lasting_id(info.folder / ID_FILE)}"
        self._run = require("trackio", "trackio").init(
            project=logging.project, name=name, resume="allow", config=info.config
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        self._run.finish()
