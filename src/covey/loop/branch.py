"""A new run that begins at a checkpoint of another one, which stays as it is.

Its folder gets the checkpoint and the record up to there, and goes on like any run that was interrupted.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.loop.checkpoint import CONFIG, Checkpoint, step_of
from covey.loop.folder import RunFolder, read_info
from covey.storage import writing
from covey.telemetry.jsonl import EPISODES_FILE, METRICS_FILE
from covey.telemetry.parts import copy_record


def parent_of(run: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """For run.json: where a branch began."""
    return {"run": str(run.resolve()), "step": checkpoint.step}


def begin_branch(folder: RunFolder, run: Path, checkpoint: Checkpoint, beginning: dict[str, Any]) -> Checkpoint:
    """Fill a new folder, with `beginning` in its run.json. Returns the checkpoint in it."""
    folder.filled = True
    copy_record(run / METRICS_FILE, folder.path / METRICS_FILE, checkpoint.state["metrics_offset"])
    copy_record(run / EPISODES_FILE, folder.path / EPISODES_FILE, checkpoint.state["episodes_offset"])
    with writing(folder.path):
        own = checkpoint.folder / CONFIG
        shutil.copyfile(own if own.is_file() else run / CONFIG, folder.path / CONFIG)
    info = read_info(run)
    folder.write_info(
        info
        | beginning
        | {
            "status": "interrupted",
            "parent": parent_of(run, checkpoint),
            "contents": contents_at(info, checkpoint.step),
            "changes": changes_before(info, checkpoint.step),
        }
    )
    # Only now: a folder without a checkpoint is not continued.
    mine = folder.path / "checkpoints"
    best = checkpoint.state["best"]
    if best is not None and best["step"] != checkpoint.step:
        other = checkpoint.folder.with_name(f"step-{best['step']:06d}")
        best = best if other.is_dir() else None
        if best is not None:
            _link(other, mine)
    _link(checkpoint.folder, mine)
    return replace(checkpoint, folder=mine / checkpoint.folder.name, state=checkpoint.state | {"best": best})


def contents_at(info: dict[str, Any], step: int) -> dict[str, str]:
    """Hashes of tasks and rewards when the checkpoint of a step was written; later ones may have changed since."""
    contents = dict(info.get("contents", {}))
    for change in reversed(info.get("changes", [])):
        if change["step"] >= step:
            contents |= {key: old for key, (old, _) in change["settings"].items() if key in contents}
    return contents


def changes_before(info: dict[str, Any], step: int) -> list[dict[str, Any]]:
    """Those that went into the checkpoint of a step."""
    return [change for change in info.get("changes", []) if change["step"] < step]


def _link(checkpoint: Path, into: Path) -> None:
    """The same files under another name, where the disk can: a checkpoint is large, and never written to again."""
    final = into / checkpoint.name
    step_of(final)  # a checkpoint's name
    with writing(final):
        into.mkdir(exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=into, prefix=".writing-"))
        work.chmod(0o755)
        shutil.copytree(checkpoint, work, copy_function=_link_or_copy, dirs_exist_ok=True)
        work.rename(final)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
