"""What of the host's files is visible inside: what Python needs, and nothing else. All of it read-only."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

SYSTEM = ("/usr", "/nix/store")
MERGED = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")  # links into /usr on most systems
LOADER = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")


class View(TypedDict):
    binds: list[str]
    links: list[tuple[str, str]]  # target, path
    hide: list[str]  # folders inside the binds that are covered


def interpreter() -> str:
    """The real executable: that of the environment would look for site-packages that are not there."""
    return os.path.realpath(sys.executable)


@functools.cache
def view(folders: tuple[str, ...] = ()) -> View:
    """`folders`: further ones to read, for packages."""
    wanted = [*SYSTEM, *LOADER, sys.base_prefix, sys.base_exec_prefix, os.path.dirname(interpreter()), *folders]
    links = [(os.readlink(path), path) for path in MERGED if os.path.islink(path)]
    wanted += [path for path in MERGED if os.path.isdir(path) and not os.path.islink(path)]
    binds: list[str] = []
    for path in sorted({os.path.realpath(path) for path in wanted if os.path.exists(path)}, key=len):
        if not any(_below(path, outer) for outer in binds):
            binds.append(path)
    return View(binds=binds, links=links, hide=_private(binds))


def _private(binds: Sequence[str]) -> list[str]:
    """Where people keep their own files, if that lies within what is bound: /usr/src/app in many containers."""
    needed = [os.path.realpath(path) for path in (sys.base_prefix, interpreter())]
    homes = [os.getcwd(), str(Path.home()), "/usr/src", "/usr/local/src"]
    found = {os.path.realpath(path) for path in homes if os.path.isdir(path)}
    inside = {path for path in found if any(_below(path, bind) for bind in binds)}
    return sorted(path for path in inside if not any(_below(wanted, path) for wanted in [*needed, *binds]))


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
