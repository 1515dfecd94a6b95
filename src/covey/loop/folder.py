"""A run's folder: who may write to it, what it holds, and which one a resumed run goes on in.

outputs/2026-01-31/14-05-09/
    run.json  config.yaml  .hydra/  metrics.jsonl  episodes.jsonl  checkpoints/
    summary.md  summary.json  curve.png  labels.json
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from covey.errors import InputError
from covey.loop.checkpoint import step_folders
from covey.redact import hide_settings
from covey.storage import LOCK, StorageFailed, is_locked, write_whole
from covey.telemetry.history import KILLED

INFO = "run.json"
ATTEMPTS, PAUSE = 10, 0.01  # at a lock, and the seconds between them
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


def lock_folder(path: Path) -> IO[str]:
    """The lock of the process that writes to a folder; BlockingIOError where another process holds it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC  # what a link in its place points to stays as it is
    file = os.fdopen(os.open(path / LOCK, flags, 0o666), "r+")
    for attempt in range(ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # perhaps only `is_locked`, for a moment
            if attempt == ATTEMPTS - 1:
                file.close()
                raise
            time.sleep(PAUSE)
    _locks.add(file)
    return file


_locks: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def _let_go_of_all() -> None:
    """In a fork: a lock is held by whoever has the file open, and a child may outlive the run."""
    for file in list(_locks):
        file.close()


os.register_at_fork(after_in_child=_let_go_of_all)
