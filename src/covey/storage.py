"""Files that are whole or as they were, and a disk's refusal in words.

Libraries that write tell of a full disk in different ways: an OSError, or an error of their own with "(os error 28)" in
its text. Here both become one `StorageFailed`, which names the path, what is needed and what is there.
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

from covey.errors import RunFailed

# What a disk answers, whatever was asked of it.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
REFUSALS = FULL | {errno.EROFS, errno.EFBIG, errno.EIO, errno.ESTALE, errno.ENODEV}
ON_A_PATH = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
_IN_TEXT = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")


class StorageFailed(RunFailed):
    """A file could not be written: the disk is full, read-only, or broken."""


def refusal(error: BaseException) -> int | None:
    """The number of the disk's answer behind an error; None where it was something else."""
    seen: BaseException | None = error
    passed: set[int] = set()
    while seen is not None and id(seen) not in passed:
        number = seen.errno if isinstance(seen, OSError) else _number_in(str(seen))
        if number in REFUSALS:
            return number
        passed.add(id(seen))
        seen = seen.__cause__ or seen.__context__
    return None


def _number_in(text: str) -> int | None:
    found = _IN_TEXT.search(text)
    return int(found[1] or found[2]) if found else None


@contextmanager
def writing(path: Path, needs: int | None = None) -> Iterator[None]:
    """While `path` is written, or something below it. `needs`: bytes, where that is known."""
    try:
        yield
    except RunFailed:
        raise
    except Exception as error:
        number = refusal(error)
        if (
            number is None
            and isinstance(error, OSError)
            and error.errno in ON_A_PATH
            and _is_near(error.filename, path)
        ):
            number = error.errno
        if number is None:
            raise
        raise StorageFailed(explain(path, number, needs)) from error


def _is_near(name: str | bytes | None, path: Path) -> bool:
    """Whether an error is about what is written, and not about a file that was read for it."""
    return name is None or Path(os.fsdecode(name)).absolute().is_relative_to(path.absolute().parent)


def explain(path: Path, number: int, needs: int | None = None) -> str:
    """Why a path could not be written, and what would help."""
    lines = [f"cannot write {path}: {os.strerror(number)}"]
    if number in FULL:
        wanted = "" if needs is None else f"it needs about {in_words(needs)}, and "
        lines.append(f"  {wanted}{_free(path)}")
        lines.append("  fix: make room there, or take another disk")
    elif number in (errno.EROFS, errno.EACCES, errno.EPERM):
        lines.append("  fix: make the folder writable, or take another one")
    return "\n".join(lines)


def _free(path: Path) -> str:
    there = next((place for place in (path, *path.parents) if place.exists()), Path.cwd())
    return f"{in_words(shutil.disk_usage(there).free)} are free on the disk of {there}"


def in_words(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def size_of_tree(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_whole(path: Path, data: str | bytes) -> None:
    """Whole on the disk, or as it was before: written beside, synced, renamed. A text is UTF-8."""
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


LOCK = ".lock"  # in a run's folder: locked as long as a process writes there


def is_locked(folder: Path) -> bool | None:
    """Whether a process writes to a folder; None where that cannot be told. The look takes a shared lock for a moment:
    whoever locks a folder must try more than once."""
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
    """All files below a folder, and the folders that name them, safely on the disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- What JSON can write down but nothing after it can take: nesting and numbers without end, half characters ----------

DEEPEST = 64  # lists and objects inside each other
TOO_DEEP = f"it is nested more than {DEEPEST} levels deep"
HALF_CHARACTER = "a string has half of a surrogate pair (\\ud800 to \\udfff)"
NOT_FINITE = "a number is too large, or not finite"


def flaw(value: Any) -> str | None:
    """The reason why a value that was read is not taken; None: it is."""
    if not shallow(value):
        return TOO_DEEP
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return HALF_CHARACTER
    except ValueError:
        return NOT_FINITE
    return None


def shallow(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for one in level if isinstance(one, dict | list) for inner in _inside(one)]
    return not any(isinstance(one, dict | list) for one in level)


def _inside(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


ATTEMPTS, PAUSE = 10, 0.01  # at a lock, and the seconds between them


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
