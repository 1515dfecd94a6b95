"""The folder of a run: found or made, and what is written down in it."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from covey.config.schema import Config
from covey.errors import InputError
from covey.redact import hide_settings, hide_words
from covey.storage import write_whole, writing

if TYPE_CHECKING:
    from covey.cli.build import Note
    from covey.learner.models import ModelSource
    from covey.loop.checkpoint import Checkpoint, CheckpointStore
    from covey.loop.folder import RunFolder
    from covey.protocols import Algorithm, Learner
    from covey.telemetry import RunInfo


class Startable(Protocol):
    """A run that could start, of whatever command."""

    @property
    def config(self) -> Config: ...

    @property
    def tree(self) -> dict[str, Any]: ...

    @property
    def overrides(self) -> tuple[str, ...]: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def algorithm(self) -> Algorithm: ...

    @property
    def model(self) -> ModelSource | None: ...

    @property
    def total_steps(self) -> int: ...

    @property
    def warnings(self) -> tuple[str, ...]: ...

    @property
    def folder(self) -> Path | None: ...

    @property
    def engine_reason(self) -> str: ...

    @property
    def command(self) -> str: ...

    def info(self, path: Path, first_step: int) -> RunInfo: ...


def open_run(prepared: Startable, note: Note) -> tuple[RunFolder, Checkpoint | None]:
    """The folder to write to, and the checkpoint to go on from where it is an earlier run's."""
    from covey.loop.folder import exact_folder, find_unfinished, new_folder, open_folder

    config, output = prepared.config, Path(prepared.config.logging.output_dir)
    if prepared.folder is not None:
        folder = exact_folder(prepared.folder)
        with _free_where_refused(folder):
            checkpoint = store(config, folder.path).latest(note)  # a job of a sweep that is started again
            _check_same(prepared, folder, checkpoint, str(prepared.folder))
        return folder, checkpoint
    if config.resume == "disable":
        return new_folder(output), None
    if config.resume == "auto":
        names = (config.logging.project, config.logging.experiment, prepared.fingerprint)
        found = find_unfinished(output, *names, note)
        if found is None:
            return new_folder(output), None
        with _free_where_refused(found):
            return found, store(config, found.path).latest(note)
    named = Path(config.resume).expanduser()
    folder = open_folder(run_of(named))
    with _free_where_refused(folder):
        checkpoint = store(config, folder.path).latest(note)
        if checkpoint is None:
            raise InputError(f"resume={config.resume}: that run has no checkpoint to go on from")
        if named not in (folder.path, checkpoint.folder):
            raise InputError(
                f"resume={config.resume}: that run goes on from its newest checkpoint, {checkpoint.folder.name}\n"
                "  to go back, delete the later ones; to start anew from these weights: model=" + str(named / "model")
            )
        _check_same(prepared, folder, checkpoint, f"resume={config.resume}")
    return folder, checkpoint


@contextmanager
def _free_where_refused(folder: RunFolder) -> Iterator[None]:
    """Who is refused lets go of the folder, and who tries again finds it free."""
    try:
        yield
    except InputError:
        folder.release()
        raise


def _check_same(prepared: Startable, folder: RunFolder, checkpoint: Checkpoint | None, asked: str) -> None:
    if checkpoint is not None and folder.info()["fingerprint"] != prepared.fingerprint:
        raise InputError(
            f"{asked}: that run had other settings, tasks or rewards\n"
            f"  its settings: {folder.path / 'config.yaml'}\n"
            f"  repeat its command, or start from its weights:  model={checkpoint.model}"
        )


def run_of(path: Path) -> Path:
    """A run's folder, also when one of its checkpoints was named."""
    return path.parent.parent if path.parent.name == "checkpoints" else path


def store(config: Config, path: Path) -> CheckpointStore:
    from covey.loop.checkpoint import CheckpointStore

    return CheckpointStore(path / "checkpoints", keep_last=config.loop.keep_last, keep_best=config.loop.keep_best)


def as_it_began(model: ModelSource | None, config: Config, folder: RunFolder) -> ModelSource | None:
    """The model at the commit that the run began with: on the hub there may be a newer one since."""
    from covey.learner.models import open_source
    from covey.rollout.templates import use_template

    began = folder.info().get("model_revision")
    if model is None or began in (None, model.revision):
        return model
    found = open_source(config.model, began)
    use_template(found.tokenizer, config.agent.template)
    return found


def threads_for(config: Config, resumed: RunFolder | None) -> int:
    """As asked; else as the run began, since the last bits depend on it; else one per core that we may use."""
    if config.loop.threads is not None:
        return config.loop.threads
    return int(resumed.info()["threads"]) if resumed is not None else len(os.sched_getaffinity(0))


def write_run_files(prepared: Startable, folder: RunFolder, learner: Learner, threads: int, *, resumed: bool) -> None:
    """run.json, config.yaml and .hydra/: what was run, so that it can be run again. A resumed run keeps its own."""
    from covey.loop.folder import next_number
    from covey.telemetry.labels import relabel

    precision = {"device": learner.device.type, "dtype": str(learner.dtype)}
    if resumed:
        info = folder.info()
        began = {name: info[name] for name in precision}
        if began != precision:
            raise InputError(
                f"this run began with {began}, and would go on with {precision}\n  set model.device, dtype"
            )
        folder.write_info(info | {"status": "running", "threads": threads})
        relabel(folder.path, prepared.config.logging)
        return
    hydra = folder.path / ".hydra"
    with writing(hydra):
        hydra.mkdir(exist_ok=True)  # a run that is started again before its first checkpoint
    for path in (folder.path / "config.yaml", hydra / "config.yaml"):
        write_whole(path, yaml.safe_dump(hide_settings(prepared.tree), sort_keys=False, allow_unicode=True))
    write_whole(hydra / "overrides.yaml", yaml.safe_dump(hide_words(prepared.overrides)))
    facts = prepared.info(folder.path, 0)
    shown = ("kind", "title", "algorithm", "model", "task", "total_steps", "reward_names", "trained_reward", "held_out")
    folder.write_info(
        {
            "project": prepared.config.logging.project,
            "experiment": prepared.config.logging.experiment,
            "fingerprint": prepared.fingerprint,
            "status": "running",
            **{name: getattr(facts, name) for name in shown},
            "tags": list(dict.fromkeys(prepared.config.logging.tags)),
            "notes": prepared.config.logging.notes,
            "number": next_number(Path(prepared.config.logging.output_dir)),
            "started": datetime.now().isoformat(timespec="seconds"),
            "command": shlex.join(["covey", prepared.command, "--config", str(folder.path / "config.yaml")]),
            "model_revision": prepared.model.revision if prepared.model is not None else None,
            "versions": versions(),
            "threads": threads,
            **precision,
        }
    )


def versions() -> dict[str, str]:
    import torch
    import transformers

    import covey

    return {"python": platform.python_version()} | {m.__name__: m.__version__ for m in (covey, torch, transformers)}
