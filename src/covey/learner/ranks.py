"""The processes that learn together, and this one's place among them.

Every rank is called with the same arguments and gives the same answers: each runs its share of the forward passes, and
what was found is summed over all. Of one process, nothing here costs anything.
"""

from __future__ import annotations

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
    def join(cls, rank: int, world: int, init_method: str, device: torch.device, *, timeout_s: float = 1800.0) -> Ranks:
        """Meet the others: `tcp://127.0.0.1:PORT` or `file:///PATH`. NCCL between GPUs, gloo between CPUs."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=init_method,
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
