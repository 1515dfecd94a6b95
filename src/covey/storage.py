"""Atomic writes, locks, checksums, and clear messages about storage errors.

Libraries report a full disk in different ways: as an OSError, or as their own error with "(os error 28)" in its text.
Here both become `StorageFailed`, which names the path, the space needed and the space available.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from covey.errors import InputError, RunFailed

# Errors of a disk, and errors of a path.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
DISK_ERRORS = FULL | {errno.EROFS, errno.EFBIG, errno.EIO, errno.ESTALE, errno.ENODEV}
PATH_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
_IN_TEXT = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")


class StorageFailed(RunFailed):
    """A file could not be written: the disk is full, read-only, or broken."""


def storage_errno(error: BaseException) -> int | None:
    """The errno of the storage error that caused this one; None if there is none."""
    cause: BaseException | None = error
    visited: set[int] = set()
    while cause is not None and id(cause) not in visited:
        number = cause.errno if isinstance(cause, OSError) else _number_in(str(cause))
        if number in DISK_ERRORS:
            return number
        visited.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return None


def _number_in(text: str) -> int | None:
    match = _IN_TEXT.search(text)
    return int(match[1] or match[2]) if match else None


@contextmanager
def writing(path: Path, needs: int | None = None) -> Iterator[None]:
    """Report storage errors while `path`, or something in it, is written. `needs`: bytes, if known."""
    try:
        yield
    except RunFailed:
        raise
    except Exception as error:
        number = storage_errno(error)
        if number is None and isinstance(error, OSError) and error.errno in PATH_ERRORS and _is_near(error, path):
            number = error.errno
        if number is None:
            raise
        raise StorageFailed(describe_failure(path, number, needs)) from error


def _is_near(error: OSError, path: Path) -> bool:
    """Whether an error is about the written path, and not about a file that was read for it."""
    name: str | bytes | None = error.filename
    return name is None or Path(os.fsdecode(name)).absolute().is_relative_to(path.absolute().parent)


def describe_failure(path: Path, number: int, needs: int | None = None) -> str:
    """Why a path could not be written, and how to fix it."""
    lines = [f"cannot write {path}: {os.strerror(number)}"]
    if number in FULL:
        required = "" if needs is None else f"it needs about {format_bytes(needs)}, and "
        lines.append(f"  {required}{_free(path)}")
        lines.append("  fix: free some space, or use another disk")
    elif number in (errno.EROFS, errno.EACCES, errno.EPERM):
        lines.append("  fix: make the folder writable, or use another one")
    return "\n".join(lines)


def _free(path: Path) -> str:
    existing = next((place for place in (path, *path.parents) if place.exists()), Path.cwd())
    return f"{format_bytes(shutil.disk_usage(existing).free)} are free on the disk of {existing}"


def format_bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def size_of_tree(folder: Path) -> int:
    """Bytes of all files in a folder tree."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a file completely or leave it unchanged: write a temporary file, sync, rename. Text is UTF-8."""
    work = path.with_name(f".{path.name}")
    raw = data.encode() if isinstance(data, str) else data
    with writing(path, needs=len(raw)):
        try:
            with work.open("wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            os.replace(work, path)
        except BaseException:
            with suppress(OSError):
                work.unlink()
            raise


LOCK = ".lock"  # in a run's folder: locked while a process writes to it


def is_locked(folder: Path) -> bool | None:
    """Whether a process has locked a folder; None if unknown. The check itself takes a shared lock for a moment, so
    `lock_folder` tries more than once."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_tree(folder: Path) -> None:
    """Sync a folder, all files in it and their folders to the disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- Limits of JSON values from outside --------------------------------------------------------------------------------

MAX_DEPTH = 64  # of nested lists and objects
TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"
LONE_SURROGATE = "a string has half of a surrogate pair (\\ud800 to \\udfff)"
NOT_FINITE = "a number is too large, or not finite"


def json_problem(value: Any) -> str | None:
    """Why a parsed JSON value is refused: nested too deeply, or not representable in UTF-8 JSON. None if it is fine."""
    if not is_shallow(value):
        return TOO_DEEP
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return LONE_SURROGATE
    except ValueError:
        return NOT_FINITE
    return None


def is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in _children(one)]
    return not any(isinstance(one, dict | list) for one in level)


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


# -- Locks -------------------------------------------------------------------------------------------------------------

ATTEMPTS, PAUSE = 10, 0.01  # to take a lock, and seconds between them


def lock_folder(path: Path) -> IO[str]:
    """Lock a folder for writing. BlockingIOError if another process has locked it. Closing the file releases the
    lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC  # never follows a link
    file = os.fdopen(os.open(path / LOCK, flags, 0o666), "r+")
    for attempt in range(ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # maybe only `is_locked`, for a moment
            if attempt == ATTEMPTS - 1:
                file.close()
                raise
            time.sleep(PAUSE)
    _locks.add(file)
    return file


_locks: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def _release_all() -> None:
    """Release inherited locks in a forked child, which may outlive the run."""
    for file in list(_locks):
        file.close()


os.register_at_fork(after_in_child=_release_all)


def text_or_file(value: str) -> str:
    """The text of the file that `value` names, or `value` itself. A word like prompt.txt must be a file."""
    is_file = os.path.isfile(value)  # False also for a text that cannot be a file's name
    if not is_file and re.fullmatch(r"[^\s{}]+\.[A-Za-z]\w{1,5}", value):
        raise InputError(f"{value}: no such file\n  give a file, or the text itself")
    return Path(value).read_text() if is_file else value
