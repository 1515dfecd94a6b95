"""Checkpoints that are whole or absent.

    checkpoints/step-000020/
        model/                   an ordinary model folder (or a peft adapter): safetensors, config, tokenizer
        optimizer.safetensors    the learner's (learner/saving.py), of several ranks in several files
        critic.safetensors       where there is a critic: its weights and its optimiser's state
        state.json               step, counters, algorithm state, offsets of the run's files
        manifest.json            sha256 of every file

Written beside, fsynced, renamed; weights that are not finite are refused (learner/saving.py). A damaged one is
named, set aside as damaged-step-000020, and the one before it is used; where all are damaged, the run is refused and
nothing is touched. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import InputError
from covey.memory import trim_freed_memory
from covey.protocols import Learner
from covey.storage import sha256, size_of_tree, sync, sync_tree, writing

MANIFEST, STATE, CONFIG = "manifest.json", "state.json", "config.yaml"
READ = (".safetensors", ".json", ".jinja", ".bin", ".pt", ".pth", ".py")  # endings of what a loader would read
_NAME = re.compile(r"step-(\d{6,})")


Best = dict[str, Any]  # step, and value: None where it was measured otherwise and is not comparable


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
        before = step_folders(self.folder)
        with writing(final, needs=size_of_tree(before[-1]) if before else None):
            full = self._write(final, learner, tokenizer, state | {"step": step})
        self.delete_old(step, state.get("best"))
        trim_freed_memory()
        return Checkpoint(final, full)

    def _write(self, final: Path, learner: Learner, tokenizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=self.folder, prefix=".writing-"))
        try:
            learner.save(work)
            tokenizer.save_pretrained(work / "model")
            full = state | {"learner": learner.counters()}
            (work / STATE).write_text(json.dumps(full, indent=1))
            if (config := self.folder.parent / CONFIG).is_file():
                shutil.copyfile(config, work / CONFIG)  # a checkpoint that is copied elsewhere says how it was trained
            manifest = {str(p.relative_to(work)): sha256(p) for p in sorted(work.rglob("*")) if p.is_file()}
            (work / MANIFEST).write_text(json.dumps(manifest, indent=1))
            _open_to_readers(work)
            sync_tree(work)
            self._put(work, final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return full

    def _put(self, work: Path, final: Path) -> None:
        """In the place of one that a killed run left there, which goes only when the new one has its name."""
        left = None
        if final.exists() or final.is_symlink():
            left = Path(tempfile.mkdtemp(dir=self.folder, prefix=".writing-"))
            final.rename(left / final.name)
        work.rename(final)
        sync(self.folder)
        if left is not None:
            _remove(left / final.name)
            left.rmdir()

    def delete_old(self, step: int, best: Best | None) -> None:
        """Those that are too many, up to this step. Later ones are of an earlier attempt: they take nobody's place."""
        past = [folder for folder in step_folders(self.folder) if step_of(folder) <= step]
        for folder in past[: -self.keep_last]:
            if not (self.keep_best and best is not None and step_of(folder) == best["step"]):
                _remove(folder)

    def latest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that is whole; None where there is none at all."""
        for leftover in self.folder.glob(".writing-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        damaged: list[DamagedCheckpoint] = []
        for folder in reversed(step_folders(self.folder)):
            try:
                found = open_checkpoint(folder)
            except DamagedCheckpoint as error:
                damaged.append(error)
                continue
            for one in damaged:
                warn(f"{one}; using the one before it{_set_aside(one.folder)}")
            return found
        if damaged:
            raise _none_is_whole(self.folder, damaged)
        return None


def best_of(best: Best | None, step: int, value: float, *, falls: bool = False) -> Best | None:
    """The best evaluation among the checkpoints, this one included: the highest, or where it `falls`, the lowest. What
    is no number is never the best: nothing would be better than it."""
    if not math.isfinite(value):
        return best
    former = None if best is None else best["value"]
    better = former is None or (value < former if falls else value > former)
    return {"step": step, "value": value} if better else best


def step_folders(folder: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first; whatever else lies there is left alone."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def step_of(folder: Path) -> int:
    found = _NAME.fullmatch(folder.name)
    assert found is not None
    return int(found[1])


class DamagedCheckpoint(RuntimeError):
    def __init__(self, folder: Path, what: str) -> None:
        super().__init__(folder, what)  # both: an exception is pickled by its arguments
        self.folder = folder
        self.what = what

    def __str__(self) -> str:
        return f"checkpoint {self.folder} is damaged: {self.what}"


def open_checkpoint(folder: Path) -> Checkpoint:
    """Checks every byte against the manifest."""
    try:
        manifest = _read_object(folder, MANIFEST)
        for name, expected in manifest.items():
            _check_file(folder, name, expected)
        for path in folder.rglob("*"):
            if path.suffix in READ and path.name != MANIFEST and str(path.relative_to(folder)) not in manifest:
                raise DamagedCheckpoint(folder, f"{path.relative_to(folder)} is not in its {MANIFEST}")
    except OSError as error:  # a bad sector, a file that may not be read
        raise DamagedCheckpoint(folder, f"{error.filename or 'a file'} cannot be read ({error.strerror})") from error
    if STATE not in manifest or not any(name.startswith("model/") for name in manifest):
        raise DamagedCheckpoint(folder, f"{MANIFEST} names no {STATE}, or no model")
    state = _read_object(folder, STATE)
    missing = {"step", "best", "learner"} - set(state)
    if missing or not isinstance(state["step"], int):
        raise DamagedCheckpoint(folder, f"{STATE} is not one of a run ({', '.join(sorted(missing)) or 'step'})")
    return Checkpoint(folder, state)


def _check_file(folder: Path, name: str, expected: Any) -> None:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DamagedCheckpoint(folder, f"{MANIFEST} names {name!r}, which is not inside it")
    if not (folder / name).is_file():
        raise DamagedCheckpoint(folder, f"{name} is missing")
    if sha256(folder / name) != expected:
        raise DamagedCheckpoint(folder, f"{name} does not match its checksum")


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / name).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(folder, f"no readable {name}") from error
    if not isinstance(found, dict):
        raise DamagedCheckpoint(folder, f"{name} is not a JSON object")
    return found


def _set_aside(folder: Path) -> str:
    """Under a name that no later run takes for a checkpoint. Where that cannot be done it stays, and is told again."""
    for number in range(100):
        aside = folder.with_name(f"damaged-{folder.name}" + (f"-{number}" if number else ""))
        if not aside.exists():
            with suppress(OSError):
                folder.rename(aside)
                return f" (it is now {aside.name})"
            break
    return ""


def _none_is_whole(folder: Path, damaged: list[DamagedCheckpoint]) -> InputError:
    lines = [f"{folder.parent} has no checkpoint that is whole:"]
    lines += [f"  {error.folder.name}: {error.what}" for error in damaged]
    lines.append("  fix: bring one of them back from a copy, or start anew with resume=disable")
    return InputError("\n".join(lines))


def _remove(folder: Path) -> None:
    """Of a link, only the link: what it points to is somebody else's."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _open_to_readers(folder: Path) -> None:
    """A temporary folder is its maker's alone; a checkpoint is for everybody who may read the run."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
