"""The processes that learn together, and this one's place among them.

Every rank is called with the same arguments and gives the same answers: each runs its share of the forward passes, and
what was found is summed over all. Ranks of a team (tensor parallelism) read the same rows and split the layers'
matrices: a share is a team's, and sums are over teams. Of one process, nothing here costs anything.

    ranks in teams of 2     0 1 | 2 3 | 4 5        shares 0 | 1 | 2;  rank 3 adds up with 1 and 5
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world: int = 1
    device: torch.device | None = None  # this rank's own; None: where the model is
    team: int = 1  # ranks that share the layers' matrices
    mesh: Any = None  # torch's, teams × members; of one rank there is none

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
        return cls(rank, world, device).in_teams(1)

    def in_teams(self, team: int) -> Ranks:
        """The same ranks with other teams. All must call it."""
        from torch.distributed.device_mesh import init_device_mesh

        if self.world == 1:
            return self
        assert self.device is not None and self.world % team == 0
        shape = (self.world // team, team)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("shares", "members"))
        return replace(self, team=team, mesh=mesh)

    def leave(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes for all."""
        return self.rank == 0

    @property
    def share(self) -> int:
        """The number of this rank's share of the rows."""
        return self.rank // self.team

    @property
    def shares(self) -> int:
        return self.world // self.team

    @property
    def member(self) -> int:
        """The number of this rank in its team."""
        return self.rank % self.team

    def sum(self, part: Tensor) -> Tensor:
        """The sum over all shares, where and as `part` is; it may be written to."""
        return part if self.shares == 1 else self._sum(part, "shares")

    def sum_in_team(self, part: Tensor) -> Tensor:
        return part if self.team == 1 else self._sum(part, "members")

    def _sum(self, part: Tensor, over: str) -> Tensor:
        total = part.to(self.device, torch.uint8 if part.dtype == torch.bool else part.dtype).contiguous()
        dist.all_reduce(total, group=self.mesh.get_group(over))
        return total.to(part.device, part.dtype)

    def sum_in_place(self, parts: Iterable[Tensor]) -> None:
        """Over all shares, all of them under way at once. They lie on this rank's device."""
        if self.shares > 1:
            group = self.mesh.get_group("shares")
            for work in [dist.all_reduce(part, group=group, async_op=True) for part in parts]:
                work.wait()

    def smallest(self, number: int) -> int:
        """Of all ranks."""
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
