"""Checkpoints that are whole or absent.

    checkpoints/step-000020/
        model/                   an ordinary model folder (or a peft adapter): safetensors, config, tokenizer
        optimizer.safetensors    the learner's (learner/saving.py), of several ranks in several files
        critic.safetensors       where there is a critic: its weights and its optimiser's state
        state.json               step, counters, algorithm state, offsets of the run's files
        manifest.json            sha256 of every file

Written beside, fsynced, renamed. A damaged one is named and the one before it is used. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.protocols import Learner


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def model(self) -> Path:
        return self.folder / "model"


class CheckpointStore:
    def __init__(self, folder: Path, *, keep_last: int, keep_best: bool) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.keep_best = keep_best

    def save(self, step: int, learner: Learner, tokenizer: Any, state: dict[str, Any]) -> Checkpoint:
        """`state` must be JSON; its "best" names the best step so far, which is never deleted."""
        final = self.folder / f"step-{step:06d}"
        self.folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=self.folder, prefix=".writing-"))
        try:
            learner.save(work)
            tokenizer.save_pretrained(work / "model")
            full = state | {"step": step, "learner": learner.counters()}
            (work / "state.json").write_text(json.dumps(full, indent=1))
            manifest = {str(p.relative_to(work)): _sha256(p) for p in sorted(work.rglob("*")) if p.is_file()}
            (work / "manifest.json").write_text(json.dumps(manifest, indent=1))
            _open_to_readers(work)
            _sync_tree(work)
            if final.exists():  # left by a run that was killed and has come by here again
                shutil.rmtree(final)
            work.rename(final)
            _sync(self.folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self._delete_old(best=(state.get("best") or {}).get("step"))
        return Checkpoint(final, full)

    def tidy(self, newest: Checkpoint) -> None:
        """Delete what a killed run was about to delete."""
        self._delete_old(best=(newest.state["best"] or {}).get("step"))

    def _delete_old(self, best: int | None) -> None:
        steps = self._folders()
        keep = set(steps[-self.keep_last :])
        for folder in steps:
            if folder not in keep and not (self.keep_best and folder.name == f"step-{best or -1:06d}"):
                shutil.rmtree(folder)

    def latest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that is whole."""
        for leftover in self.folder.glob(".writing-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for folder in reversed(self._folders()):
            try:
                return open_checkpoint(folder)
            except DamagedCheckpoint as error:
                warn(f"{error}; using the one before it")
        return None

    def _folders(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))


class DamagedCheckpoint(RuntimeError):
    pass


def open_checkpoint(folder: Path) -> Checkpoint:
    """Checks every byte against the manifest."""
    try:
        manifest: dict[str, str] = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"checkpoint {folder} is damaged: no readable manifest.json") from error
    for name, expected in manifest.items():
        if not (folder / name).is_file():
            raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {name} is missing")
        if _sha256(folder / name) != expected:
            raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {name} does not match its checksum")
    return Checkpoint(folder, json.loads((folder / "state.json").read_text()))


def _open_to_readers(folder: Path) -> None:
    """A temporary folder is its maker's alone; a checkpoint is for everybody who may read the run."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
