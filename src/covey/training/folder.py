"""A run's folder: its lock, run.json, and finding the folder of a run to resume.

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

from covey.errors import InputError, describe_error
from covey.redact import hide_known, hide_settings
from covey.storage import LOCK, StorageFailed, is_locked, lock_folder, write_atomically, writing
from covey.telemetry.evaluations import copy_evaluations
from covey.telemetry.history import KILLED
from covey.telemetry.jsonl import EPISODES_FILE, METRICS_FILE, copy_record
from covey.training.checkpoint import CONFIG, Checkpoint, step_folders, step_of

INFO = "run.json"
KEYS = ("project", "experiment", "fingerprint", "status")  # identify a run
_RESTORE = "fix: restore it from a copy, or start a new run with resume=disable and model=RUN/checkpoints/step-…/model"


@dataclass
class RunFolder:
    path: Path
    lock: IO[str]  # held during the run; the system releases it however the run ends
    made: tuple[Path, ...] = ()  # folders that were created for it, innermost first
    filled: bool = False  # with another run's checkpoint (`begin_branch`), and nothing of its own yet

    def write_info(self, info: dict[str, Any]) -> None:
        """Write run.json atomically."""
        kept = {key: info[key] for key in KEYS if key in info}  # these must not be redacted
        write_atomically(self.path / INFO, json.dumps(hide_settings(info) | kept, indent=1))

    def info(self) -> dict[str, Any]:
        return read_info(self.path)

    def set_status(self, status: str) -> None:
        self.write_info(self.info() | {"status": status})

    def release(self) -> None:
        self.lock.close()

    def abandon(self, error: BaseException | None = None) -> None:
        """After a failed start, remove the folder if the run wrote nothing of its own to it. Otherwise the `error` is
        written to run.json."""
        if error is not None and not self.filled and (self.path / INFO).is_file():
            self._write_error(error)
        if self.filled:
            for entry in self.path.iterdir():
                if entry.name != LOCK:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        remove_unused(self.path, self.made)
        self.release()

    def _write_error(self, error: BaseException) -> None:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        with suppress(InputError, StorageFailed):  # must not hide the error that ended the run
            if (info := self.info())["status"] == "running":
                self.write_info(info | {"status": status, "error": hide_known(describe_error(error))})


def missing_folders(path: Path) -> tuple[Path, ...]:
    """The folders that must be created so that `path` exists, innermost first."""
    return tuple(folder for folder in (path, *path.parents) if not folder.exists())


def remove_unused(path: Path, made: Sequence[Path], *, files: Sequence[str] = ()) -> None:
    """Remove the folders that were created for `path`, if it holds nothing but its lock and `files`."""
    if path not in made or {entry.name for entry in path.iterdir()} - {LOCK, *files}:
        return
    for name in (*files, LOCK):
        (path / name).unlink(missing_ok=True)
    for folder in made:
        try:
            folder.rmdir()
        except OSError:  # another run has started next to this one
            return


def new_folder(output_dir: Path) -> RunFolder:
    """output_dir/DATE/TIME; a second run in the same second gets a number."""
    now = datetime.now()
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
            raise _cannot_write(output_dir, error) from error
        return RunFolder(path, lock_folder(path), made)
    raise InputError(f"cannot create a run folder in {output_dir}")


def _cannot_write(path: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot write to {path}: {error.strerror}\n  fix: make it writable, or use another: logging.output_dir=FOLDER"
    )


def read_info(path: Path) -> dict[str, Any]:
    """Read run.json, and check that it has the keys that identify a run."""
    try:
        info = json.loads((path / INFO).read_text())
    except OSError as error:
        raise InputError(f"{path / INFO} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path / INFO} is damaged: {error}\n  {_RESTORE}") from error
    missing = [key for key in KEYS if key not in info] if isinstance(info, dict) else list(KEYS)
    if missing:
        raise InputError(f"{path / INFO} is damaged: {', '.join(missing)} missing\n  {_RESTORE}")
    return dict(info)


def exact_folder(path: Path) -> RunFolder:
    """The folder of a given path, for one run of a sweep. It exists already if that run is started again."""
    made = missing_folders(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        return RunFolder(path, lock_folder(path), made)
    except BlockingIOError as error:
        raise InputError(f"{path}: a run is still running there") from error
    except OSError as error:
        raise _cannot_write(path, error) from error


def open_folder(path: Path) -> RunFolder:
    """The folder of an existing run, to resume it."""
    require_run(path)
    try:
        return RunFolder(path, lock_folder(path))
    except BlockingIOError as error:
        raise InputError(f"resume={path}: that run is still running") from error
    except OSError as error:
        raise _cannot_write(path, error) from error


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
    """The newest unfinished run of this name and configuration that is not running. With `parent`, only one that
    branched off at that checkpoint."""
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
            warn(f"{info_file.parent} has the same settings and is still running: it is not resumed")
        except OSError as error:
            raise _cannot_write(info_file.parent, error) from error
    return None


def other_unfinished(output_dir: Path, project: str, experiment: str) -> Iterator[Path]:
    """Unfinished runs of this name with a checkpoint that are not running, the newest first."""
    for info_file in sorted(output_dir.glob("*/*/run.json"), key=_order, reverse=True):
        run = info_file.parent
        with suppress(InputError):  # reported by `find_unfinished`
            info = read_info(run)
            if (info["project"], info["experiment"]) != (project, experiment) or info["status"] == "finished":
                continue
            if step_folders(run / "checkpoints") and not is_locked(run):
                yield run


def _close_killed(path: Path, warn: Callable[[str], None]) -> None:
    """Mark a run without checkpoint, whose process has ended, as killed in its run.json, if it can be written."""
    with suppress(OSError, StorageFailed), lock_folder(path) as lock:
        RunFolder(path, lock).set_status(KILLED)
        warn(f"{path} was killed before its first checkpoint; a new run starts")


def next_number(output_dir: Path) -> int:
    """The number of a new run, for run.json. Runs are numbered in the order in which they start."""
    return 1 + max((_order(path)[0] for path in output_dir.glob("*/*/run.json")), default=0)


def _order(info_file: Path) -> tuple[int, str]:
    """Sort key: the newest run last, even if the clock was set back. Runs without a number are sorted by name."""
    try:
        return int(json.loads(info_file.read_text())["number"]), str(info_file)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0, str(info_file)


# -- Branches ----------------------------------------------------------------------------------------------------------
# A branch is a new run that starts at a checkpoint of another one. Its folder gets the checkpoint and the record up to
# it, and is then resumed like an interrupted run. The other run stays unchanged.


def parent_of(run: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """The run and step at which a branch starts, for run.json."""
    return {"run": str(run.resolve()), "step": checkpoint.step}


def begin_branch(folder: RunFolder, run: Path, checkpoint: Checkpoint, start_info: dict[str, Any]) -> Checkpoint:
    """Fill a new folder, with `start_info` in its run.json. Returns the checkpoint in it."""
    folder.filled = True
    copy_record(run / METRICS_FILE, folder.path / METRICS_FILE, checkpoint.state["metrics_offset"])
    copy_record(run / EPISODES_FILE, folder.path / EPISODES_FILE, checkpoint.state["episodes_offset"])
    copy_evaluations(run, folder.path, checkpoint.step)
    with writing(folder.path):
        own = checkpoint.folder / CONFIG
        shutil.copyfile(own if own.is_file() else run / CONFIG, folder.path / CONFIG)
    info = read_info(run)
    folder.write_info(
        info
        | start_info
        | {
            "status": "interrupted",
            "parent": parent_of(run, checkpoint),
            "contents": contents_at(info, checkpoint.step),
            "changes": changes_before(info, checkpoint.step),
        }
    )
    # Last, because a folder without a checkpoint is not resumed.
    checkpoints = folder.path / "checkpoints"
    best = checkpoint.state["best"]
    if best is not None and best["step"] != checkpoint.step:
        other = checkpoint.folder.with_name(f"step-{best['step']:06d}")
        best = best if other.is_dir() else None
        if best is not None:
            _link(other, checkpoints)
    _link(checkpoint.folder, checkpoints)
    return replace(checkpoint, folder=checkpoints / checkpoint.folder.name, state=checkpoint.state | {"best": best})


def contents_at(info: dict[str, Any], step: int) -> dict[str, str]:
    """Hashes of tasks and rewards when the checkpoint of a step was written. They may have changed since."""
    contents = dict(info.get("contents", {}))
    for change in reversed(info.get("changes", [])):
        if change["step"] >= step:
            contents |= {key: old for key, (old, _) in change["settings"].items() if key in contents}
    return contents


def changes_before(info: dict[str, Any], step: int) -> list[dict[str, Any]]:
    """The changes of settings before the checkpoint of a step."""
    return [change for change in info.get("changes", []) if change["step"] < step]


def _link(checkpoint: Path, into: Path) -> None:
    """Copy a checkpoint by hard links if possible: it is large, and its files never change."""
    final = into / checkpoint.name
    step_of(final)  # asserts that it is the name of a checkpoint
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
