"""The processes that learn together, and this one's place among them.

Every rank is called with the same arguments and gives the same answers: each runs its share of the forward passes, and
what was found is summed over all. Of one process, nothing here costs anything.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world: int = 1
    device: torch.device | None = None  # this rank's own; None: where the model is

    @classmethod
    def join(
        cls, rank: int, world: int, meet: str | dist.Store, device: torch.device, *, timeout_s: float = 1800.0
    ) -> Ranks:
        """Meet the others: at `file:///PATH` or in a store. NCCL between GPUs, gloo between CPUs."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=meet if isinstance(meet, str) else None,
            store=None if isinstance(meet, str) else meet,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        return cls(rank, world, device)

    def leave(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes for all."""
        return self.rank == 0

    def sum(self, part: Tensor) -> Tensor:
        """The sum over all ranks, where and as `part` is; it may be written to."""
        if self.world == 1:
            return part
        total = part.to(self.device, torch.uint8 if part.dtype == torch.bool else part.dtype).contiguous()
        dist.all_reduce(total)
        return total.to(part.device, part.dtype)

    def sum_in_place(self, parts: Iterable[Tensor]) -> None:
        """All of them under way at once. They lie on this rank's device."""
        if self.world > 1:
            for work in [dist.all_reduce(part, async_op=True) for part in parts]:
                work.wait()

    def smallest(self, number: int) -> int:
        if self.world == 1:
            return number
        found = torch.tensor(number, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def any(self, here: bool) -> bool:
        return -self.smallest(-int(here)) == 1

    def wait_for_all(self) -> None:
        """Nobody goes on before everybody is here."""
        self.smallest(0)


ALONE = Ranks()


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
