"""Atomic checkpoints: each is complete or absent.

    checkpoints/step-000020/
        model/                   an ordinary model folder (or a peft adapter): safetensors, config, tokenizer
        optimizer.safetensors    optimiser state (learner/saving.py); one file per rank if weights are sharded
        critic.safetensors       weights and optimiser state of the critic, if there is one
        state.json               step, counters, algorithm state, offsets of the run's files
        opponents/               past policies that play roles (agent.opponents)
        manifest.json            sha256 of every file

A checkpoint is written to a temporary folder, synced and renamed. Non-finite weights are refused (learner/saving.py). A
damaged checkpoint is reported, renamed to damaged-step-000020, and the one before it is used; if all are damaged, the
run is refused and nothing is changed. Nothing is ever unpickled.
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
LOADABLE = (".safetensors", ".json", ".jinja", ".bin", ".pt", ".pth", ".py")  # files that a loader might read
_NAME = re.compile(r"step-(\d{6,})")


Best = dict[str, Any]  # step and value; value None: measured differently, so not comparable


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

    def save(
        self,
        step: int,
        learner: Learner,
        tokenizer: Any,
        state: dict[str, Any],
        *,
        more: Callable[[Path], None] | None = None,
    ) -> Checkpoint:
        """`state` must be JSON. Its "best" names the best step so far, which is never deleted. `more` adds files."""
        final = self.folder / f"step-{step:06d}"
        before = step_folders(self.folder)
        with writing(final, needs=size_of_tree(before[-1]) if before else None):
            full = self._write(final, learner, tokenizer, state | {"step": step}, more)
        self.delete_old(step, state.get("best"))
        trim_freed_memory()
        return Checkpoint(final, full)

    def _write(
        self,
        final: Path,
        learner: Learner,
        tokenizer: Any,
        state: dict[str, Any],
        more: Callable[[Path], None] | None,
    ) -> dict[str, Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=self.folder, prefix=".writing-"))
        try:
            learner.save(work)
            tokenizer.save_pretrained(work / "model")
            if more is not None:
                more(work)
            full = state | {"learner": learner.counters()}
            (work / STATE).write_text(json.dumps(full, indent=1))
            if (config := self.folder.parent / CONFIG).is_file():
                shutil.copyfile(config, work / CONFIG)  # a copied checkpoint keeps its settings
            manifest = {str(p.relative_to(work)): sha256(p) for p in sorted(work.rglob("*")) if p.is_file()}
            (work / MANIFEST).write_text(json.dumps(manifest, indent=1))
            work.chmod(0o755)  # a temporary folder is private
            for path in work.rglob("*"):
                path.chmod(0o755 if path.is_dir() else 0o644)
            sync_tree(work)
            self._replace(work, final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return full

    def _replace(self, work: Path, final: Path) -> None:
        """Rename to the final name. A checkpoint that a killed run left there is removed only afterwards."""
        old = None
        if final.exists() or final.is_symlink():
            old = Path(tempfile.mkdtemp(dir=self.folder, prefix=".writing-"))
            final.rename(old / final.name)
        work.rename(final)
        sync(self.folder)
        if old is not None:
            _remove(old / final.name)
            old.rmdir()

    def delete_old(self, step: int, best: Best | None) -> None:
        """Delete all but the last `keep_last` up to this step, and the best. Later ones belong to an earlier attempt
        and do not count."""
        past = [folder for folder in step_folders(self.folder) if step_of(folder) <= step]
        for folder in past[: -self.keep_last]:
            if not (self.keep_best and best is not None and step_of(folder) == best["step"]):
                _remove(folder)

    def latest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest intact checkpoint; None if there is no checkpoint at all."""
        for leftover in self.folder.glob(".writing-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        damaged: list[DamagedCheckpoint] = []
        for folder in reversed(step_folders(self.folder)):
            try:
                checkpoint = open_checkpoint(folder)
            except DamagedCheckpoint as error:
                damaged.append(error)
                continue
            for damage in damaged:
                warn(f"{damage}; using the one before it{_rename_damaged(damage.folder)}")
            return checkpoint
        if damaged:
            lines = [f"{self.folder.parent} has no intact checkpoint:"]
            lines += [f"  {error.folder.name}: {error.what}" for error in damaged]
            lines.append("  fix: restore one of them from a copy, or start again with resume=disable")
            raise InputError("\n".join(lines))
        return None


def best_of(best: Best | None, step: int, value: float, *, lower_is_better: bool = False) -> Best | None:
    """The better of the best evaluation so far and this one. A non-finite value is never the best: nothing would ever
    be better."""
    if not math.isfinite(value):
        return best
    previous = None if best is None else best["value"]
    better = previous is None or (value < previous if lower_is_better else value > previous)
    return {"step": step, "value": value} if better else best


def step_folders(folder: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first. Other entries are ignored."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def step_of(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


class DamagedCheckpoint(RuntimeError):
    def __init__(self, folder: Path, what: str) -> None:
        super().__init__(folder, what)  # both: an exception is pickled by its arguments
        self.folder = folder
        self.what = what

    def __str__(self) -> str:
        return f"checkpoint {self.folder} is damaged: {self.what}"


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint, with every file verified against the manifest."""
    try:
        manifest = _read_object(folder, MANIFEST)
        for name, expected in manifest.items():
            _check_file(folder, name, expected)
        for path in folder.rglob("*"):
            if path.suffix in LOADABLE and path.name != MANIFEST and str(path.relative_to(folder)) not in manifest:
                raise DamagedCheckpoint(folder, f"{path.relative_to(folder)} is not in its {MANIFEST}")
    except OSError as error:  # a bad sector, or no permission
        raise DamagedCheckpoint(folder, f"{error.filename or 'a file'} cannot be read ({error.strerror})") from error
    if STATE not in manifest or not any(name.startswith("model/") for name in manifest):
        raise DamagedCheckpoint(folder, f"{MANIFEST} names no {STATE}, or no model")
    state = _read_object(folder, STATE)
    missing = {"step", "best", "learner"} - set(state)
    if missing or not isinstance(state["step"], int):
        raise DamagedCheckpoint(folder, f"{STATE} is not the state of a run ({', '.join(sorted(missing)) or 'step'})")
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
        data = json.loads((folder / name).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(folder, f"no readable {name}") from error
    if not isinstance(data, dict):
        raise DamagedCheckpoint(folder, f"{name} is not a JSON object")
    return data


def _rename_damaged(folder: Path) -> str:
    """Rename a damaged checkpoint so that no later run uses it. Returns a note, empty if it could not be renamed."""
    for number in range(100):
        target = folder.with_name(f"damaged-{folder.name}" + (f"-{number}" if number else ""))
        if not target.exists():
            with suppress(OSError):
                folder.rename(target)
                return f" (it is now {target.name})"
            break
    return ""


def _remove(folder: Path) -> None:
    """Remove a checkpoint. If it is a symbolic link, remove only the link."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    else:
        shutil.rmtree(folder)
