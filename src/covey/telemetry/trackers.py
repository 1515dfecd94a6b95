"""Weights & Biases. `WANDB_MODE=offline` keeps everything in the run folder until `wandb sync`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from covey.config.schema import LoggingConfig
from covey.redact import hide_words
from covey.telemetry.base import RunInfo, Tracker, flat, lasting_id, require
from covey.telemetry.history import History

WANDB_ID_FILE = "wandb_run_id"


class WandbSink(Tracker):
    elsewhere = True

    def __init__(self, info: RunInfo, logging: LoggingConfig) -> None:
        begins = not (
            info.folder / WANDB_ID_FILE
        ).exists()  # a resumed run keeps the labels that were changed on its page
        self._run = require("wandb", "wandb").init(
            project=logging.project,
            name=logging.experiment,
            id=lasting_id(info.folder / WANDB_ID_FILE),
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


# -- TensorBoard event files, in FOLDER/tensorboard --------------------------------------------------------------------


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


# -- MLflow: to the server or database that MLFLOW_TRACKING_URI names; without it MLflow's own choice ------------------

MLFLOW_ID_FILE = "mlflow_run_id"
STATUSES = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED", "restarting": "KILLED"}
NOTES = "mlflow.note.content"  # MLflow shows it as the description of the run
PARAMS_AT_ONCE = 100  # more are refused
FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)  # in names


class MlflowSink(Tracker):
    elsewhere = True

    def __init__(self, info: RunInfo, logging: LoggingConfig) -> None:
        self._mlflow = require("mlflow", "mlflow")
        self._client = self._mlflow.MlflowClient()
        path = info.folder / MLFLOW_ID_FILE
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


# -- Trackio: a database on this machine (where TRACKIO_DIR says), seen with `trackio show` ----------------------------

TRACKIO_ID_FILE = "trackio_run_id"


class TrackioSink(Tracker):
    elsewhere = True

    def __init__(self, info: RunInfo, logging: LoggingConfig) -> None:
        # Trackio knows a run by its name alone: the id tells runs of one experiment apart.
        name = f"{logging.experiment}-{lasting_id(info.folder / TRACKIO_ID_FILE)}"
        self._run = require("trackio", "trackio").init(
            project=logging.project, name=name, resume="allow", config=info.config
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        self._run.finish()
