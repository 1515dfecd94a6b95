"""A run's folder: who may write to it, what it holds, and which one a resumed run goes on in.

outputs/2026-01-31/14-05-09/
    run.json  config.yaml  .hydra/  metrics.jsonl  episodes.jsonl  checkpoints/
    summary.md  summary.json  curve.png  labels.json
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from covey.errors import InputError
from covey.redact import hide_settings
from covey.storage import LOCK, StorageFailed, is_locked, lock_folder, write_whole, writing
from covey.telemetry.history import KILLED
from covey.telemetry.jsonl import EPISODES_FILE, METRICS_FILE, copy_record
from covey.training.checkpoint import CONFIG, Checkpoint, step_folders, step_of

INFO = "run.json"
KEYS = ("project", "experiment", "fingerprint", "status")  # that a run is recognised by


@dataclass
class RunFolder:
    path: Path
    lock: IO[str]  # held while the run lives; the system lets go of it however the run ends
    made: tuple[Path, ...] = ()  # the folders that did not exist before, innermost first
    filled: bool = False  # from another run's checkpoint (branch.py); nothing of its own was written yet

    def write_info(self, info: dict[str, Any]) -> None:
        """run.json, whole or as it was."""
        kept = {key: info[key] for key in KEYS if key in info}  # what it is recognised by stays as it is
        write_whole(self.path / INFO, json.dumps(hide_settings(info) | kept, indent=1))

    def info(self) -> dict[str, Any]:
        return read_info(self.path)

    def set_status(self, status: str) -> None:
        self.write_info(self.info() | {"status": status})

    def release(self) -> None:
        self.lock.close()

    def abandon(self) -> None:
        """After a start that failed: nothing is left of a folder that nothing of its own was written to."""
        if self.filled:
            for entry in self.path.iterdir():
                if entry.name != LOCK:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        remove_unused(self.path, self.made)
        self.release()


def missing_folders(path: Path) -> tuple[Path, ...]:
    """Those that must be made so that `path` exists, innermost first."""
    return tuple(folder for folder in (path, *path.parents) if not folder.exists())


def remove_unused(path: Path, made: Sequence[Path], *, files: Sequence[str] = ()) -> None:
    """Remove the folders that were made for `path`, if it holds nothing but its lock and `files`."""
    if path not in made or {entry.name for entry in path.iterdir()} - {LOCK, *files}:
        return
    for name in (*files, LOCK):
        (path / name).unlink(missing_ok=True)
    for folder in made:
        try:
            folder.rmdir()
        except OSError:  # another run has begun beside this one
            return


def new_folder(output_dir: Path, now: datetime | None = None) -> RunFolder:
    """output_dir/DATE/TIME; a second run in the same second gets a number."""
    now = now or datetime.now()
    base = output_dir / now.strftime("%Y-%m-%d") / now.strftime("%H-%M-%S")
    for attempt in range(1000):
        path = base if attempt == 0 else base.with_name(f"{base.name}-{attempt}")
        made = missing_folders(path)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                raise InputError(f"{path} is a file\n  fix: logging.output_dir=FOLDER") from None
            continue
        except OSError as error:
            raise _no_place(output_dir, error) from error
        return RunFolder(path, lock_folder(path), made)
    raise InputError(f"cannot make a run folder in {output_dir}")


def _no_place(path: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot write to {path}: {error.strerror}\n  fix: make it writable, or take another: logging.output_dir=FOLDER"
    )


def read_info(path: Path) -> dict[str, Any]:
    """What run.json says; InputError where it is none."""
    try:
        found = json.loads((path / INFO).read_text())
    except OSError as error:
        raise InputError(f"{path / INFO} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path / INFO} is damaged: {error}\n  {_MEND}") from error
    missing = [key for key in KEYS if key not in found] if isinstance(found, dict) else list(KEYS)
    if missing:
        raise InputError(f"{path / INFO} is damaged: it does not say {', '.join(missing)}\n  {_MEND}")
    return dict(found)


_MEND = "fix: bring it back from a copy, or start anew with resume=disable and model=RUN/checkpoints/step-…/model"


def exact_folder(path: Path) -> RunFolder:
    """A folder whose name is settled, for one of many runs. It is there already where the run is started again."""
    made = missing_folders(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        return RunFolder(path, lock_folder(path), made)
    except BlockingIOError as error:
        raise InputError(f"{path}: a run is still running there") from error
    except OSError as error:
        raise _no_place(path, error) from error


def open_folder(path: Path) -> RunFolder:
    """An existing run's folder, to go on in it."""
    require_run(path)
    try:
        return RunFolder(path, lock_folder(path))
    except BlockingIOError as error:
        raise InputError(f"resume={path}: that run is still running") from error
    except OSError as error:
        raise _no_place(path, error) from error


def require_run(path: Path) -> None:
    if not (path / INFO).is_file():
        raise InputError(
            f"resume={path}: not a run's folder ({INFO} is missing)\n"
            "  give the folder outputs/DATE/TIME of a run, or resume=auto, or resume=disable"
        )


def find_unfinished(
    output_dir: Path,
    project: str,
    experiment: str,
    fingerprint: str,
    warn: Callable[[str], None],
    parent: Mapping[str, Any] | None = None,
) -> RunFolder | None:
    """The newest unfinished run of this name and configuration that nobody is running; with `parent`, one that began
    at that checkpoint."""
    for checkpoints in sorted(output_dir.glob("*/*/checkpoints")):
        if not (checkpoints.parent / INFO).exists() and step_folders(checkpoints):
            warn(f"{checkpoints.parent} has checkpoints, but its {INFO} is missing; that run is not resumed")
    for info_file in sorted(output_dir.glob("*/*/run.json"), key=_order, reverse=True):
        resumable = bool(step_folders(info_file.parent / "checkpoints"))
        try:
            info = read_info(info_file.parent)
        except InputError as error:
            if resumable:
                warn(f"{str(error).splitlines()[0]}; that run is not resumed")
            continue
        ours = (info["project"], info["experiment"], info["fingerprint"]) == (project, experiment, fingerprint)
        if not ours or info["status"] == "finished" or parent not in (None, info.get("parent")):
            continue
        if not resumable:
            if info["status"] == "running" and is_locked(info_file.parent) is False:
                _close_killed(info_file.parent, warn)
            continue
        try:
            return RunFolder(info_file.parent, lock_folder(info_file.parent))
        except BlockingIOError:
            warn(f"{info_file.parent} has the same settings and is still running: it is left alone")
        except OSError as error:
            raise _no_place(info_file.parent, error) from error
    return None


def other_unfinished(output_dir: Path, project: str, experiment: str) -> Iterator[Path]:
    """Unfinished runs of this name that nobody is running and that have a checkpoint, the newest first."""
    for info_file in sorted(output_dir.glob("*/*/run.json"), key=_order, reverse=True):
        run = info_file.parent
        with suppress(InputError):  # told of by `find_unfinished`
            info = read_info(run)
            if (info["project"], info["experiment"]) != (project, experiment) or info["status"] == "finished":
                continue
            if step_folders(run / "checkpoints") and not is_locked(run):
                yield run


def _close_killed(path: Path, warn: Callable[[str], None]) -> None:
    """A run without a checkpoint whose process is gone: its run.json says so from now on, where it can be written."""
    with suppress(OSError, StorageFailed), lock_folder(path) as lock:
        RunFolder(path, lock).set_status(KILLED)
        warn(f"{path} was killed before its first checkpoint; a new run begins")


def next_number(output_dir: Path) -> int:
    """For run.json: runs are counted as they begin."""
    return 1 + max((_order(path)[0] for path in output_dir.glob("*/*/run.json")), default=0)


def _order(info_file: Path) -> tuple[int, str]:
    """The newest last, also where the clock was set back in between. Runs without a number go by their names."""
    try:
        return int(json.loads(info_file.read_text())["number"]), str(info_file)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0, str(info_file)


# -- A new run that begins at a checkpoint of another one, which stays as it is ----------------------------------------
# Its folder gets the checkpoint and the record up to there, and goes on like any run that was interrupted.


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
