"""How new weights travel from the learner to engines in other processes.

    in_process      nothing travels: the engine samples with the learner's own module (cluster=local)
    shared_memory   a file in memory that all processes of a machine see
    collective      broadcast from learner to engines, in buckets: NCCL between GPUs, gloo between CPUs
    file            a file in the run's folder, which every machine must see; always works

Only what is trained travels; an engine has loaded the rest itself. A file is written beside, checksummed and renamed; a
reader waits until it is there as it was written. An engine takes new weights when all of them have arrived.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from covey.errors import RunFailed
from covey.storage import lock_folder
from covey.weights.names import (
    BUCKET,
    SHARED_MEMORY,
    Named,
    buckets,
    file_digest,
    full_weights,
    unpacked,
    weights_folder,
    write_weights,
)

PATIENCE = 60.0  # seconds that a reader waits for a file: a network's file system shows it late
MEETING = timedelta(seconds=120)  # for members of a group to come together, and for a transfer


class WeightsDamaged(RunFailed):
    """Weights did not arrive as they were sent."""


@dataclass(frozen=True)
class Notice:
    """Weights of a version lie there."""

    version: int
    path: str
    digest: str


# -- what travels -----------------------------------------------------------------------------------------------


def trained_weights(model: Any) -> Named:
    """Adapters where there are some, else every weight once."""
    return full_weights(model, trained_only=True)


def bucket_size(model: Any) -> int:
    """Bytes that a bucket must have for the largest weight, and need not be over for all of them."""
    sizes = [-(-w.numel() * w.element_size() // 16) * 16 for w in model.parameters() if w.requires_grad]
    return max(max(sizes), min(BUCKET, sum(sizes)))


@torch.no_grad()
def load_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Into the same model in another process."""
    mine = dict(trained_weights(model))
    if set(mine) != set(weights):
        odd = sorted(set(mine) ^ set(weights))
        raise WeightsDamaged(f"the engine's model is another than the learner's: they differ in {', '.join(odd[:3])}")
    for name, weight in weights.items():
        mine[name].copy_(weight)


# -- by file, also in memory ------------------------------------------------------------------------------------


def memory_folder(size: int) -> tuple[Path, IO[str]]:
    """A folder for so many bytes, in memory where there is room, and the lock that says it is in use. What runs that
    were killed have left is removed first: nobody holds its lock any more."""
    for place in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        for folder in place.glob("covey-weights-*"):
            _remove_left(folder)
    folder = weights_folder(size)
    return folder, lock_folder(folder)


def _remove_left(folder: Path) -> None:
    """Others can write where it lies: only a folder of our own is touched, and no link is followed."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or not (folder / ".lock").is_file():
            return
        held = lock_folder(folder)
    except OSError:  # in use, or gone meanwhile
        return
    shutil.rmtree(folder, ignore_errors=True)
    held.close()


def write_notice(named: Named, folder: Path, version: int) -> Notice:
    folder.mkdir(parents=True, exist_ok=True)
    path, digest = write_weights(named, folder, version)
    return Notice(version, str(path), digest)


def read_notice(notice: Notice, patience: float = PATIENCE) -> dict[str, Tensor]:
    """The weights, mapped and not copied, once their bytes are those that were written."""
    from safetensors.torch import load_file

    path, until = Path(notice.path), time.monotonic() + patience
    while True:
        found = file_digest(path) if path.is_file() else None
        if found == notice.digest:
            return load_file(path)
        if time.monotonic() > until:
            what = "is not there" if found is None else "does not match its checksum"
            raise WeightsDamaged(
                f"weights of version {notice.version}: {path} {what}\n"
                "  every machine must see the run's folder (logging.output_dir), or use cluster.transport=collective"
            )
        time.sleep(min(0.2, patience / 10))


def remove_older(folder: Path, version: int) -> None:
    for path in folder.glob("version-*.safetensors"):
        if path.name != f"version-{version}.safetensors":
            path.unlink(missing_ok=True)


# -- by broadcast -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meeting:
    """Where the members of a group find each other. Each replacement of a member needs a new one."""

    host: str
    port: int
    members: int
    gpu: bool


class WeightGroup:
    """Learner (rank 0) and engines. Apart from the learners' own group, since its members come and go."""

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        address: str,
        door: socket.socket | None = None,
        wait: timedelta = MEETING,
    ) -> None:
        """`address`: of this machine, as the others see it. `door`: rank 0's, which listens where they meet."""
        self.device = torch.device("cuda" if meeting.gpu else "cpu")
        store = open_store(meeting.host, meeting.port, meeting.members, door, wait)
        self._group: Any
        if meeting.gpu:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = wait
            self._group = dist.ProcessGroupNCCL(store, rank, meeting.members, options)
        else:
            gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            gloo._timeout = wait
            self._group = dist.ProcessGroupGloo(store, rank, meeting.members, gloo)
        self._store = store  # lives as long as the group

    def send(self, named: Named, bucket: int) -> None:
        """All weights to everybody, so many bytes at once."""
        buffer = torch.empty(bucket, dtype=torch.uint8, device=self.device)
        digest = hashlib.sha256()
        for layout in buckets(named, buffer):
            head = json.dumps(layout).encode()
            digest.update(head)
            self._text(head)
            self._broadcast(buffer[: _used(layout)])
        self._text(json.dumps({"digest": digest.hexdigest()}).encode())

    def receive(self) -> dict[str, Tensor]:
        """The weights that rank 0 sends."""
        found: dict[str, Tensor] = {}
        digest = hashlib.sha256()
        while True:
            head = self._text(None)
            layout = json.loads(head)
            if isinstance(layout, dict):
                if layout["digest"] != digest.hexdigest():
                    raise WeightsDamaged("a part of the weights did not arrive")
                return found
            digest.update(head)
            buffer = torch.empty(_used(layout), dtype=torch.uint8, device=self.device)
            self._broadcast(buffer)
            found.update(unpacked(buffer, layout))

    def _text(self, text: bytes | None) -> bytes:
        """Rank 0 gives a text, the others get it."""
        size = torch.tensor([len(text or b"")], dtype=torch.int64, device=self.device)
        self._broadcast(size)
        body = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        if text is not None:
            body.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self._broadcast(body)
        return bytes(body.cpu().numpy())

    def _broadcast(self, tensor: Tensor) -> None:
        self._group.broadcast(tensor, 0).wait()


def _used(layout: list[dict[str, Any]]) -> int:
    last = layout[-1]
    size = getattr(torch, last["dtype"]).itemsize
    for side in last["shape"]:
        size *= side
    return int(last["at"] + size)


def listen(host: str) -> socket.socket:
    """A free port of one address. Left to itself, torch's store would listen on all of a machine's."""
    family = socket.getaddrinfo(host, None)[0][0]
    door = socket.socket(family)
    door.bind((host, 0))
    door.listen()
    return door


def open_store(
    host: str, port: int, members: int, door: socket.socket | None, wait: timedelta = timedelta(seconds=1800)
) -> dist.Store:
    """Where members find each other. Who holds the door (`listen`) keeps the store, and the door with it."""
    fd = door.detach() if door is not None else None
    return dist.TCPStore(host, port, members, is_master=door is not None, timeout=wait, master_listen_fd=fd)
