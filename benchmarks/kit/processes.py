"""A run's processes seen from outside, through /proc: memory, files, threads, sandboxes, temporary files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KIB = 1024


@dataclass(frozen=True)
class Seen:
    """A moment of a run. Memory in MiB; `uss` is what would be free if the process were gone."""

    rss: float  # of the driver
    pss: float
    uss: float
    tree_pss: float  # of the driver and its descendants
    files: int  # open, of the driver
    tree_files: int
    threads: int  # of the driver
    tree_threads: int
    children: int  # processes under the driver
    sandboxes: int  # bubblewrap processes among the children
    zombies: int
    temporary: int  # entries in the run's own temporary folder
    temporary_mb: float
    shared_memory: int  # entries in /dev/shm


def look(driver: int, temporary: Path) -> Seen | None:
    """None when the driver has ended."""
    own = _memory(driver)
    if own is None:
        return None
    tree = list(descendants(driver))
    memories = [found for pid in tree if (found := _memory(pid)) is not None]
    entries = [*_walk(temporary)]
    return Seen(
        *own,
        tree_pss=own[1] + sum(memory[1] for memory in memories),
        files=_count(driver, "fd"),
        tree_files=sum(_count(pid, "fd") for pid in (driver, *tree)),
        threads=_count(driver, "task"),
        tree_threads=sum(_count(pid, "task") for pid in (driver, *tree)),
        children=len(tree),
        sandboxes=sum(_read(Path(f"/proc/{pid}/comm")).strip() == "bwrap" for pid in tree),
        zombies=sum(") Z " in _read(Path(f"/proc/{pid}/stat")) for pid in tree),
        temporary=len(entries),
        temporary_mb=sum(entries) / KIB**2,
        shared_memory=len(os.listdir("/dev/shm")),
    )


def descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from descendants(child)


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in _read(task / "children").split()]
    except OSError:
        return []


def _memory(pid: int) -> tuple[float, float, float] | None:
    """RSS, PSS and USS in MiB; None for a process that has ended."""
    found = dict.fromkeys(("Rss", "Pss", "Private_Clean", "Private_Dirty"), 0.0)
    text = _read(Path(f"/proc/{pid}/smaps_rollup"))
    if not text:
        return None
    for line in text.splitlines()[1:]:
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = float(rest.split()[0]) / KIB
    return found["Rss"], found["Pss"], found["Private_Clean"] + found["Private_Dirty"]


def _count(pid: int, what: str) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/{what}"))
    except OSError:
        return 0


def _walk(folder: Path) -> Iterator[int]:
    """The sizes of the files in a folder, some of which may be removed in the meantime."""
    for path, folders, files in os.walk(folder, onerror=lambda error: None):
        yield from (0 for _ in folders)
        for name in files:
            try:
                yield os.lstat(os.path.join(path, name)).st_size
            except OSError:
                continue


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
