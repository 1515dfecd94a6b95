"""A long file of JSON lines in parts: episodes.jsonl, and when that is full episodes-0001.jsonl, episodes-0002.jsonl, …

A part that is full is left alone from then on: it can be copied while the run goes on. Places in the record are counted
over all parts as if they were one file: a checkpoint remembers one number.
"""

from __future__ import annotations

import os
from contextlib import suppress
from io import FileIO
from pathlib import Path

from covey.errors import InputError
from covey.storage import writing

PART_BYTES = 256 << 20  # a part takes no further line from here on


def parts_of(path: Path) -> list[Path]:
    """The parts that exist, in order; `path` is the first."""
    found = [path] if path.exists() else []
    while found and (following := _part(path, len(found))).exists():
        found.append(following)
    return found


def size_of(path: Path) -> int:
    """Bytes of all parts."""
    return sum(part.stat().st_size for part in parts_of(path))


def whole_lines(path: Path) -> int:
    """Bytes of all parts without a last line that was not written to its end."""
    size = size_of(path)
    if not size:
        return 0
    with parts_of(path)[-1].open("rb") as file:
        tail = file.read()
    return size - (len(tail) - tail.rfind(b"\n") - 1)


class PartWriter:
    """Appends lines after the first `offset` bytes of the record; what stood behind them is cut away."""

    def __init__(self, path: Path, offset: int, part_bytes: int = PART_BYTES) -> None:
        self._path, self._part_bytes = path, part_bytes
        self._number, self._before = _cut(path, offset)
        self._open("ab")

    def write(self, line: bytes) -> None:
        """All of it, or nothing: what a full disk took of a line is cut off again."""
        if self._size >= self._part_bytes:
            self._next()
        with writing(self._here, needs=len(line)):
            rest = memoryview(line)
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(self._size)
                raise
        self._size += len(line)

    def synced(self) -> int:
        """Bytes of all parts, once they are safely on the disk."""
        with writing(self._here):
            os.fsync(self._file.fileno())
        return self._before + self._size

    def close(self) -> None:
        self._file.close()

    def _next(self) -> None:
        self._before = self.synced()
        self._file.close()
        self._number += 1
        self._open("wb")

    def _open(self, mode: str) -> None:
        """Nothing is held back in this process: what is written is in the file, and closing it cannot fail for it."""
        self._here = _part(self._path, self._number)
        with writing(self._here):
            self._file = FileIO(self._here, mode)
        self._size = self._file.seek(0, os.SEEK_END)


def copy_record(source: Path, target: Path, size: int) -> None:
    """The first `size` bytes of a record, in the same parts."""
    require_size(source, size)
    rest = size
    for number, part in enumerate(parts_of(source)):
        if number and not rest:
            break
        copy = _part(target, number)
        with part.open("rb") as old, writing(copy, needs=rest), copy.open("wb") as new:
            while rest and (chunk := old.read(min(rest, 1 << 20))):
                new.write(chunk)
                rest -= len(chunk)


def require_size(path: Path, size: int) -> None:
    """A record that a checkpoint was written behind must have at least the bytes of then."""
    if (found := size_of(path)) < size:
        raise InputError(
            f"{path}: {found} bytes, but the checkpoint was written when it had {size}\n"
            "  the file was cut or replaced since; start a new run with resume=disable"
        )


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number:04d}{path.suffix}") if number else path


def _cut(path: Path, offset: int) -> tuple[int, int]:
    """Cut the record to `offset` bytes; the number of the part that is last now, and the bytes before it."""
    parts, before, last = parts_of(path), 0, 0
    for number, part in enumerate(parts[:-1]):
        size = part.stat().st_size
        if before + size >= offset:
            break
        before, last = before + size, number + 1
    for part in reversed(parts[last + 1 :]):  # from the end: a kill in between leaves no gap
        part.unlink()
    if parts:
        os.truncate(parts[last], offset - before)
    return last, before
