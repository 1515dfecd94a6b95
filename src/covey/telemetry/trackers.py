"""Experiment trackers: W&B, TensorBoard, MLflow and Trackio. Each gets the metrics of every step and evaluation."""

from __future__ import annotations

import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from covey.config.schema import LoggingConfig
from covey.imports import require
from covey.redact import hide_words
from covey.telemetry.base import EpisodeRecords, EpisodeView, Metrics, RunInfo, Sink, flatten, persistent_id
from covey.telemetry.history import History

TRACKERS = {"wandb": "wandb", "tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "trackio": "trackio"}
WANDB_ID_FILE, MLFLOW_ID_FILE, TRACKIO_ID_FILE = "wandb_run_id", "mlflow_run_id", "trackio_run_id"


def import_tracker(name: str) -> Any:
    return require(TRACKERS[name], name, f"logging.to={name} needs the package {name}")


class Tracker(Sink, ABC):
    """A sink for metrics alone."""

    @abstractmethod
    def log(self, step: int, metrics: Metrics) -> None: ...

    def step(self, index: int, metrics: Metrics, sample: EpisodeView | None, episodes: EpisodeRecords) -> None:
        self.log(index, metrics)

    def evaluation(self, step: int, metrics: Metrics, sample: EpisodeView | None) -> None:
        self.log(step, metrics)


class WandbSink(Tracker):
    """Weights & Biases. With `WANDB_MODE=offline` the data stays in the run folder until `wandb sync`."""

    external = True

    def __init__(self, info: RunInfo, logging: LoggingConfig) -> None:
        id_file = info.folder / WANDB_ID_FILE
        is_new = not id_file.exists()  # on resume, labels edited on the W&B page are kept
        self._run = import_tracker("wandb").init(
            project=logging.project,
            name=logging.experiment,
            id=persistent_id(id_file),
            resume="allow",
            dir=str(info.folder),
            config=info.config,
            tags=(logging.tags or None) if is_new else None,
            notes=(logging.notes or None) if is_new else None,
            # W&B's metadata records the command line, which here contains a secret.
            settings={"x_disable_meta": True} if hide_words(sys.argv) != sys.argv else None,
        )
        # W&B's own counter only moves forward; a run resumed from a checkpoint repeats steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({**metrics, "step": step})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class TensorboardSink(Tracker):
    """TensorBoard event files in FOLDER/tensorboard."""

    def __init__(self, info: RunInfo, history: History) -> None:
        folder = info.folder / "tensorboard"
        resumed = folder.exists()
        self._writer = import_tracker("tensorboard").SummaryWriter(
            log_dir=str(folder), purge_step=info.first_step if resumed else None
        )
        # Purging also hides the evaluation at the checkpoint itself, so it is logged again.
        for record in history.evaluations:
            if resumed and record.step >= info.first_step:
                self.log(record.step, record.metrics)

    def log(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.close()


MLFLOW_STATUSES = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED", "restarting": "KILLED"}
MLFLOW_NOTES = "mlflow.note.content"  # the tag that MLflow shows as the run's description
MLFLOW_MAX_PARAMS = 100  # per request
MLFLOW_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)  # characters that names may not have


class MlflowSink(Tracker):
    """MLflow: logs to MLFLOW_TRACKING_URI, or to MLflow's default."""

    external = True

    def __init__(self, info: RunInfo, logging: LoggingConfig) -> None:
        self._mlflow = import_tracker("mlflow")
        self._client = self._mlflow.MlflowClient()
        path = info.folder / MLFLOW_ID_FILE
        if path.exists():  # a resumed run continues its page
            self._id = path.read_text(encoding="ascii").strip()
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._create(info, logging, path)

    def _create(self, info: RunInfo, logging: LoggingConfig, path: Path) -> str:
        experiment = self._client.get_experiment_by_name(logging.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(logging.project)
        tags = {_mlflow_name(tag): "true" for tag in logging.tags}
        tags |= {MLFLOW_NOTES: logging.notes} if logging.notes else {}
        run_id = str(self._client.create_run(number, run_name=logging.experiment, tags=tags).info.run_id)
        path.write_text(run_id + "\n", encoding="ascii")
        settings = flatten(info.config)
        params = [self._mlflow.entities.Param(_mlflow_name(key), str(value)) for key, value in settings.items()]
        for first in range(0, len(params), MLFLOW_MAX_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + MLFLOW_MAX_PARAMS])
        return run_id

    def log(self, step: int, metrics: Metrics) -> None:
        now, metric = int(1000 * time.time()), self._mlflow.entities.Metric
        self._client.log_batch(
            self._id, metrics=[metric(_mlflow_name(key), float(value), now, step) for key, value in metrics.items()]
        )

    def close(self, status: str) -> None:
        self._client.set_terminated(self._id, MLFLOW_STATUSES[status])


def _mlflow_name(key: str) -> str:
    return MLFLOW_FORBIDDEN.sub("_", key)


class TrackioSink(Tracker):
    """Trackio: a local database (in TRACKIO_DIR), shown with `trackio show`."""

    external = True

    def __init__(self, info: RunInfo, logging: LoggingConfig) -> None:
        # Trackio identifies a run by its name alone; the id tells runs of one experiment apart.
        name = f"{logging.experiment}-{persistent_id(info.folder / TRACKIO_ID_FILE)}"
        self._run = import_tracker("trackio").init(
            project=logging.project, name=name, resume="allow", config=info.config
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        self._run.finish()


def open_trackers(info: RunInfo, logging: LoggingConfig, history: History) -> Iterator[Tracker]:
    """The trackers of `logging.to`."""
    if "wandb" in logging.to:
        yield WandbSink(info, logging)
    if "tensorboard" in logging.to:
        yield TensorboardSink(info, history)
    if "mlflow" in logging.to:
        yield MlflowSink(info, logging)
    if "trackio" in logging.to:
        yield TrackioSink(info, logging)
