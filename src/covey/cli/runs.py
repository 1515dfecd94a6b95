"""Run folders and checkpoints that are named in place of a model: `covey eval RUN`, `covey train model=RUN`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from covey.config import Composed
from covey.errors import InputError


def run_of(path: Path) -> Path:
    """A run's folder, also when one of its checkpoints was named."""
    return path.parent.parent if path.parent.name == "checkpoints" else path


def is_run(name: str) -> bool:
    """Whether a name is a run's folder, or one of its checkpoints."""
    return (run_of(Path(name).expanduser()) / "run.json").is_file()


def checkpoint_folder(path: Path) -> Path:
    """The folder of a checkpoint, also when it was named without leading zeros: step-20 for step-000020."""
    short = re.fullmatch(r"step-(\d{1,5})", path.name)
    return path.with_name(f"step-{int(short[1]):06d}") if short and not path.exists() else path


def model_of(name: str) -> Path:
    """The model folder of a run (its best checkpoint's) or of the checkpoint that was named."""
    path = Path(name).expanduser()
    return best_model(path) if path == run_of(path) else named_model(path)


def named_model(checkpoint: Path) -> Path:
    """Of a checkpoint that was named, once its bytes are checked."""
    from covey.loop.checkpoint import DamagedCheckpoint, open_checkpoint

    try:
        return open_checkpoint(checkpoint_folder(checkpoint)).model
    except DamagedCheckpoint as error:
        raise InputError(str(error)) from error


def best_model(run: Path) -> Path:
    """The checkpoint with the best evaluation, or else the last."""
    from covey.loop.checkpoint import DamagedCheckpoint, open_checkpoint, step_folders

    folders = step_folders(run / "checkpoints")
    if not folders:
        raise InputError(f"{run} has no checkpoint yet\n  runs write one at the end, or every loop.save_every steps")
    try:
        last = open_checkpoint(folders[-1])
        best = last.state["best"]
        named = run / "checkpoints" / f"step-{best['step']:06d}" if best else last.folder
        return (open_checkpoint(named) if named.is_dir() else last).model
    except DamagedCheckpoint as error:
        raise InputError(f"{error}\n  name another one of {run / 'checkpoints'}") from error


def with_model_folder(composed: Composed) -> Composed:
    """With the folder of the weights where model.name is a run: the run may write better checkpoints later, and what
    is trained here starts from this one."""
    config = composed.config
    if not is_run(config.model.name):
        return composed
    name = str(model_of(config.model.name))
    tree: dict[str, Any] = composed.tree | {"model": composed.tree["model"] | {"name": name}}
    return dataclasses.replace(
        composed, config=dataclasses.replace(config, model=dataclasses.replace(config.model, name=name)), tree=tree
    )
