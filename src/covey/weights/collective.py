"""Broadcasting weights from the learner (rank 0) to engines: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import hashlib
import json
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from covey.weights.buckets import buckets, unpacked, used_bytes
from covey.weights.files import WeightsDamaged
from covey.weights.names import Named

TIMEOUT = timedelta(seconds=120)  # for the members to join, and for a transfer


@dataclass(frozen=True)
class Rendezvous:
    """The address where the members of a group join. Every new group needs a new one."""

    host: str
    port: int
    members: int
    gpu: bool


class WeightGroup:
    """A process group of the learner and the engines. It is separate from the learner's own group because engines come
    and go."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        address: str,
        listener: socket.socket | None = None,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        """`address`: this machine's, as the others see it. `listener`: rank 0's socket at the rendezvous."""
        self.device = torch.device("cuda" if rendezvous.gpu else "cpu")
        store = open_store(rendezvous.host, rendezvous.port, rendezvous.members, listener, timeout)
        self._group: Any
        if rendezvous.gpu:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, rendezvous.members, options)
        else:
            gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            gloo._timeout = timeout
            self._group = dist.ProcessGroupGloo(store, rank, rendezvous.members, gloo)
        self._store = store  # must live as long as the group

    def send(self, named: Named, bucket: int) -> None:
        """Broadcast all weights, `bucket` bytes at a time: a layout and its bytes, and a digest of the layouts at the
        end."""
        buffer = torch.empty(bucket, dtype=torch.uint8, device=self.device)
        digest = hashlib.sha256()
        for layout in buckets(named, buffer):
            header = json.dumps(layout).encode()
            digest.update(header)
            self._broadcast_text(header)
            self._broadcast(buffer[: used_bytes(layout)])
        self._broadcast_text(json.dumps({"digest": digest.hexdigest()}).encode())

    def receive(self) -> dict[str, Tensor]:
        """The weights that rank 0 sends."""
        weights: dict[str, Tensor] = {}
        digest = hashlib.sha256()
        while True:
            header = self._broadcast_text(None)
            layout = json.loads(header)
            if isinstance(layout, dict):
                if layout["digest"] != digest.hexdigest():
                    raise WeightsDamaged("a part of the weights did not arrive")
                return weights
            digest.update(header)
            buffer = torch.empty(used_bytes(layout), dtype=torch.uint8, device=self.device)
            self._broadcast(buffer)
            weights.update(unpacked(buffer, layout))

    def _broadcast_text(self, text: bytes | None) -> bytes:
        """Rank 0 passes the text, the others None; all return it."""
        size = torch.tensor([len(text or b"")], dtype=torch.int64, device=self.device)
        self._broadcast(size)
        body = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        if text is not None:
            body.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self._broadcast(body)
        return bytes(body.cpu().numpy())

    def _broadcast(self, tensor: Tensor) -> None:
        self._group.broadcast(tensor, 0).wait()


def listen(host: str) -> socket.socket:
    """A socket on a free port of one address. torch's store by itself would listen on all addresses of the machine."""
    family = socket.getaddrinfo(host, None)[0][0]
    listener = socket.socket(family)
    listener.bind((host, 0))
    listener.listen()
    return listener


def open_store(
    host: str, port: int, members: int, listener: socket.socket | None, timeout: timedelta = timedelta(seconds=1800)
) -> dist.Store:
    """The store through which members find each other. The member with the listener (`listen`) runs the store, which
    takes ownership of the socket."""
    fd = listener.detach() if listener is not None else None
    return dist.TCPStore(host, port, members, is_master=listener is not None, timeout=timeout, master_listen_fd=fd)
