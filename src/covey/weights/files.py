"""Weights in files: a safetensors file is written under a temporary name, fsynced, checksummed and renamed. A reader
waits until the file has the checksum of its manifest, so it never loads half of it.

The folder is in shared memory, in the system's temporary folder, or in the run's folder.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from covey.errors import RunFailed
from covey.storage import lock_folder, sync, writing
from covey.storage import sha256 as file_digest

if TYPE_CHECKING:
    from torch import Tensor

    from covey.weights.names import Named

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - folders in it are made by mkdtemp
PATIENCE = 60.0  # seconds a reader waits for a file: network file systems show it late


class WeightsDamaged(RunFailed):
    """Weights did not arrive as they were sent."""


@dataclass(frozen=True)
class WeightManifest:
    """The file that holds a version of the weights, and its sha256."""

    version: int
    path: str
    digest: str


def write_weights(named: Named, folder: Path, version: int) -> WeightManifest:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"version-{version}.safetensors"
    temporary = path.with_suffix(".writing")
    weights = {name: weight.cpu().contiguous() for name, weight in named}
    try:
        with writing(path, needs=sum(weight.numel() * weight.element_size() for weight in weights.values())):
            save_file(weights, temporary)
            digest = file_digest(temporary)
            sync(temporary)
            temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return WeightManifest(version, str(path), digest)


def read_weights(manifest: WeightManifest, patience: float = PATIENCE) -> dict[str, Tensor]:
    """The weights, memory-mapped, once the file has its checksum. Raises `WeightsDamaged` after `patience` seconds."""
    from safetensors.torch import load_file

    path, until = Path(manifest.path), time.monotonic() + patience
    while True:
        digest = file_digest(path) if path.is_file() else None
        if digest == manifest.digest:
            return load_file(path)
        if time.monotonic() > until:
            fault = "is not there" if digest is None else "does not match its checksum"
            raise WeightsDamaged(
                f"weights of version {manifest.version}: {path} {fault}\n"
                "  every machine must see the run's folder (logging.output_dir), or use cluster.transport=collective"
            )
        time.sleep(min(0.2, patience / 10))


def remove_older(folder: Path, version: int) -> None:
    for path in folder.glob("version-*.safetensors"):
        if path.name != f"version-{version}.safetensors":
            path.unlink(missing_ok=True)


def weights_folder(size: int) -> Path:
    """A new folder for files of `size` bytes: in shared memory if there is room."""
    has_room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 1.5 * size
    return Path(tempfile.mkdtemp(prefix="covey-weights-", dir=SHARED_MEMORY if has_room else None))


def locked_weights_folder(size: int) -> tuple[Path, IO[str]]:
    """Like `weights_folder`, with a lock that marks the folder as in use. Unlocked folders of killed runs are removed
    first."""
    for parent in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        for folder in parent.glob("covey-weights-*"):
            _remove_if_abandoned(folder)
    folder = weights_folder(size)
    return folder, lock_folder(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Anybody can write to the parent folder: remove only folders of this user, and follow no links."""
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or not (folder / ".lock").is_file():
            return
        lock = lock_folder(folder)
    except OSError:  # in use, or removed meanwhile
        return
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()
