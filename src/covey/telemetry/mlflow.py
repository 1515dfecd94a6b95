"""MLflow: to the server or database that MLFLOW_TRACKING_URI names; without it MLflow's own choice."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path

from covey.config.schema import LoggingConfig
from covey.telemetry.base import RunInfo, Tracker, flat, require

ID_FILE = "mlflow_run_id"
STATUSES = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED", "restarting": "KILLED"}
NOTES = "mlflow.note.content"  # MLflow shows it as the description of the run
PARAMS_AT_ONCE = 100  # more are refused
FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)  # in names


class MlflowSink(Tracker):
    elsewhere = True

    def __init__(self, info: RunInfo, logging: LoggingConfig) -> None:
        self._mlflow = require("mlflow", "mlflow")
        self._client = self._mlflow.MlflowClient()
        path = info.folder / ID_FILE
        if path.exists():  # a resumed run continues its page
            self._id = path.read_text(encoding="ascii").strip()
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._create(info, logging, path)

    def close(self, status: str) -> None:
        self._client.set_terminated(self._id, STATUSES[status])

    def _create(self, info: RunInfo, logging: LoggingConfig, path: Path) -> str:
        experiment = self._client.get_experiment_by_name(logging.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(logging.project)
        tags = {_name(tag): "true" for tag in logging.tags} | ({NOTES: logging.notes} if logging.notes else {})
        found = str(self._client.create_run(number, run_name=logging.experiment, tags=tags).info.run_id)
        path.write_text(found + "\n", encoding="ascii")
        params = [self._mlflow.entities.Param(_name(key), str(value)) for key, value in flat(info.config).items()]
        for first in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(found, params=params[first : first + PARAMS_AT_ONCE])
        return found

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now, metric = int(1000 * time.time()), self._mlflow.entities.Metric
        self._client.log_batch(
            self._id, metrics=[metric(_name(key), float(value), now, step) for key, value in metrics.items()]
        )


def _name(key: str) -> str:
    return FORBIDDEN.sub("_", key)
