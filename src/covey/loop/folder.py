"""A run's folder: who may write to it, what it holds, and which one a resumed run goes on in.

outputs/2026-01-31/14-05-09/
    run.json  config.yaml  .hydra/  metrics.jsonl  episodes.jsonl  checkpoints/  summary.md  curve.png
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from covey.errors import InputError


@dataclass
class RunFolder:
    path: Path
    lock: IO[str]  # held while the run lives; the system lets go of it however the run ends

    def write_info(self, info: dict[str, Any]) -> None:
        """run.json, whole or as it was."""
        work = self.path / ".run.json"
        work.write_text(json.dumps(info, indent=1))
        os.replace(work, self.path / "run.json")

    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "run.json").read_text())
        return found

    def set_status(self, status: str) -> None:
        self.write_info(self.info() | {"status": status})

    def release(self) -> None:
        self.lock.close()


def new_folder(output_dir: Path, now: datetime | None = None) -> RunFolder:
    """output_dir/DATE/TIME; a second run in the same second gets a number."""
    now = now or datetime.now()
    base = output_dir / now.strftime("%Y-%m-%d") / now.strftime("%H-%M-%S")
    for attempt in range(1000):
        path = base if attempt == 0 else base.with_name(f"{base.name}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return RunFolder(path, lock_folder(path))
    raise InputError(f"cannot make a run folder in {output_dir}")


def exact_folder(path: Path) -> RunFolder:
    """A folder whose name is settled, for one of many runs. It is there already where the run is started again."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        return RunFolder(path, lock_folder(path))
    except BlockingIOError as error:
        raise InputError(f"{path}: a run is still running there") from error


def open_folder(path: Path) -> RunFolder:
    """An existing run's folder, to go on in it."""
    if not (path / "run.json").is_file():
        raise InputError(
            f"resume={path}: not a run's folder (run.json is missing)\n"
            "  give the folder outputs/DATE/TIME of a run, or resume=auto, or resume=disable"
        )
    try:
        return RunFolder(path, lock_folder(path))
    except BlockingIOError as error:
        raise InputError(f"resume={path}: that run is still running") from error


def find_unfinished(
    output_dir: Path, project: str, experiment: str, fingerprint: str, warn: Callable[[str], None]
) -> RunFolder | None:
    """The newest unfinished run of this name and configuration that nobody is running."""
    for info_file in sorted(output_dir.glob("*/*/run.json"), reverse=True):
        if not any((info_file.parent / "checkpoints").glob("step-*")):
            continue  # nothing to go on from: it is left as it is
        try:
            info = json.loads(info_file.read_text())
            ours = (info["project"], info["experiment"], info["fingerprint"]) == (project, experiment, fingerprint)
            if not ours or info["status"] == "finished":
                continue
        except (ValueError, LookupError, TypeError, RecursionError, OSError):
            warn(f"{info_file} is not readable; that run is not resumed")
            continue
        try:
            return RunFolder(info_file.parent, lock_folder(info_file.parent))
        except BlockingIOError:  # that run is alive
            continue
    return None


def lock_folder(path: Path) -> IO[str]:
    """Held by who writes to a folder; BlockingIOError where somebody else does."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC  # what a link in its place points to stays as it is
    file = os.fdopen(os.open(path / ".lock", flags, 0o666), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    return file
