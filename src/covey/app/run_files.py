"""Writes run.json, config.yaml and .hydra/ to a run's folder, and compares them when the run is resumed."""

from __future__ import annotations

import os
import platform
import shlex
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from covey.config.read import load_yaml
from covey.config.schema import Config
from covey.config.validate import UNUSED_BY_SFT, Change, differences, matches
from covey.errors import InputError
from covey.redact import hide_settings, hide_words
from covey.storage import write_atomically, writing

if TYPE_CHECKING:
    from covey.models.loading import ModelSource
    from covey.protocols import Algorithm, Learner
    from covey.telemetry import RunInfo
    from covey.training.checkpoint import Checkpoint, CheckpointStore
    from covey.training.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class PreparedRun(ABC):
    """A run of covey train or covey sft that is checked and can start. Nothing is loaded yet."""

    command: ClassVar[str]

    config: Config
    tree: dict[str, Any]
    overrides: tuple[str, ...]
    fingerprint: str
    contents: dict[str, str]  # hashes of what settings refer to by name: tasks, demonstrations, rewards, objects
    algorithm: Algorithm
    model: ModelSource | None  # None: validation without the model
    total_steps: int
    warnings: tuple[str, ...]
    folder: Path | None = None  # where to write; None: output_dir/DATE/TIME
    engine_reason: str = ""  # why rollout=auto chose its engine
    absent: tuple[str, ...] = ()  # resources missing on this machine, tolerated by a check
    rejected: int = 0  # warnings that would be errors in a run

    @abstractmethod
    def info(self, path: Path, first_step: int) -> RunInfo: ...


def store(config: Config, path: Path) -> CheckpointStore:
    from covey.training.checkpoint import CheckpointStore

    return CheckpointStore(path / "checkpoints", keep_last=config.loop.keep_last, keep_best=config.loop.keep_best)


def at_original_revision(model: ModelSource | None, config: Config, folder: RunFolder) -> ModelSource | None:
    """The model at the commit that the run started from: the hub may have a newer one."""
    from covey.models.loading import open_source
    from covey.rollout.templates import use_template

    info = folder.info()
    began = info.get("model_revision")
    if model is None or began in (None, model.revision) or info["model"] != config.model.name:
        return model
    found = open_source(config.model, began)
    use_template(found.tokenizer, config.agent.template)
    return found


def threads_for(config: Config, resumed: RunFolder | None) -> int:
    """The number of CPU threads: loop.threads, that of the resumed run (results depend on it in the last bits),
    OMP_NUM_THREADS, or the cores of this process."""
    if config.loop.threads is not None:
        return config.loop.threads
    if resumed is not None:
        return int(resumed.info()["threads"])
    variable = os.environ.get("OMP_NUM_THREADS", "")
    return int(variable) if variable.isdecimal() and int(variable) > 0 else len(os.sched_getaffinity(0))


def write_run_files(
    prepared: PreparedRun, folder: RunFolder, learner: Learner, threads: int, checkpoint: Checkpoint | None
) -> None:
    """Write run.json, config.yaml and .hydra/, so that the run can be repeated. A resumed run keeps the facts about its
    start and gets the current settings."""
    from covey.telemetry.history import relabel
    from covey.training.folder import changes_before

    precision = {"device": learner.device.type, "dtype": str(learner.dtype)}
    facts = _facts(prepared, folder.path) | {"threads": threads}
    if checkpoint is None:
        _write_settings(prepared, folder.path)
        revision = prepared.model.revision if prepared.model is not None else None
        folder.write_info(facts | start_info(prepared, folder.path) | {"model_revision": revision} | precision)
        return
    info = folder.info()
    began = {name: info[name] for name in precision}
    if began != precision:
        raise InputError(f"this run began with {began} and would continue with {precision}\n  set model.device, dtype")
    history = changes_before(info, checkpoint.step)
    if changed := {change.key: [change.old, change.new] for change in changes_since(prepared, folder.path, checkpoint)}:
        history.append({"step": checkpoint.step, "settings": changed})
    info.pop("changes", None)
    info.pop("error", None)
    folder.write_info(info | facts | ({"changes": history} if history else {}))
    relabel(folder.path, prepared.config.logging)  # reads the settings that the next line replaces
    _write_settings(prepared, folder.path)


def start_info(prepared: PreparedRun, path: Path) -> dict[str, Any]:
    """The fields of run.json about the start of a run."""
    from covey.training.folder import next_number

    return {
        "tags": list(dict.fromkeys(prepared.config.logging.tags)),
        "notes": prepared.config.logging.notes,
        "number": next_number(Path(prepared.config.logging.output_dir)),
        "started": datetime.now().isoformat(timespec="seconds"),
        "command": shlex.join(["covey", prepared.command, "--config", str(path / "config.yaml")]),
        "versions": versions(),
    }


def _facts(prepared: PreparedRun, path: Path) -> dict[str, Any]:
    """The fields of run.json about the current settings."""
    facts = prepared.info(path, 0)
    shown = ("kind", "title", "algorithm", "model", "task", "total_steps", "reward_names", "trained_reward", "held_out")
    return {
        "project": prepared.config.logging.project,
        "experiment": prepared.config.logging.experiment,
        "fingerprint": prepared.fingerprint,
        "status": "running",
        **{name: getattr(facts, name) for name in shown},
        "contents": prepared.contents,
    }


def _write_settings(prepared: PreparedRun, path: Path) -> None:
    """Write config.yaml and .hydra/, without resume=RUN, so that a run with these settings starts from the
    beginning."""
    named = prepared.tree["resume"] not in ("auto", "disable")
    tree = prepared.tree | ({"resume": "auto"} if named else {})
    words = [word for word in prepared.overrides if not (named and word.startswith("resume="))]
    hydra = path / ".hydra"
    with writing(hydra):
        hydra.mkdir(exist_ok=True)  # exists if the run is restarted before its first checkpoint
    for file in (path / "config.yaml", hydra / "config.yaml"):
        write_atomically(file, yaml.safe_dump(hide_settings(tree), sort_keys=False, allow_unicode=True))
    write_atomically(hydra / "overrides.yaml", yaml.safe_dump(hide_words(words)))


def changes_since(prepared: PreparedRun, run: Path, checkpoint: Checkpoint | None) -> list[Change]:
    """Settings, tasks and rewards that differ from those of a checkpoint, or of the run if `checkpoint` is None."""
    from covey.training.checkpoint import CONFIG
    from covey.training.folder import contents_at, read_info

    own = run / CONFIG if checkpoint is None else checkpoint.folder / CONFIG
    old = load_yaml(own if own.is_file() else run / CONFIG)
    if not isinstance(old, dict):
        raise InputError(f"{run / CONFIG} is damaged: it holds no settings")
    found = differences(old, hide_settings(prepared.tree), prepared.config)
    if prepared.command == "sft":
        found = [change for change in found if not matches(change.key, UNUSED_BY_SFT)]
    info = read_info(run)
    before = info.get("contents", {}) if checkpoint is None else contents_at(info, checkpoint.step)
    for name, digest in prepared.contents.items():
        if before.get(name, digest) != digest:
            found.append(Change(name, before[name], digest))
    return found


def versions() -> dict[str, str]:
    import torch
    import transformers

    import covey

    return {"python": platform.python_version()} | {m.__name__: m.__version__ for m in (covey, torch, transformers)}
