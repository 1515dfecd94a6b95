"""Following a file of JSON lines that another process writes: only what is new is read, and a cut is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

KEPT = 64  # bytes before the place we stand at, to recognise the file by


def at_home(path: Path) -> bool:
    """Whether a file is there, and in its folder. A link that leads elsewhere is not followed: a run that somebody sent
    must not show our other files, and a report must not take them along."""
    return path.is_file() and path.resolve().parent == path.parent.resolve()


class Tail:
    """The whole lines of a file, each once. A last line without its line break waits until it is finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.cuts = 0
        self._before = b""

    @property
    def size(self) -> int:
        return self.path.stat().st_size if at_home(self.path) else 0

    def skip_to(self, offset: int) -> None:
        """Lines before are known already."""
        self.offset, self._before = offset, b"\n" * min(offset, KEPT)
        self._before = self._bytes_before()

    def was_cut(self) -> bool:
        """A resumed run cuts its files back to a checkpoint and writes on: the bytes before our place are then gone or
        others. If so, begin again."""
        if not self._before or (self.size >= self.offset and self._bytes_before() == self._before):
            return False
        self.offset, self._before = 0, b""
        self.cuts += 1
        return True

    def lines(self, limit: int | None = None) -> Iterator[tuple[int, bytes]]:
        """(offset, line) of what is new; `limit`: stop after about so many bytes."""
        if self.size <= self.offset:
            return
        stop = None if limit is None else self.offset + limit
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while stop is None or self.offset < stop:
                line = file.readline()
                if not line.endswith(b"\n"):
                    return
                start, self.offset = self.offset, self.offset + len(line)
                self._before = line[-KEPT:]
                yield start, line

    def _bytes_before(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset - len(self._before))
            return file.read(len(self._before))
