"""Several training processes on this machine, for tests. They start once and run one job after another."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from covey.learner.parallel import Ranks


class LocalRanks:
    """`run(job, *arguments)` calls job(ranks, *arguments) in every process. A job is a function of a module."""

    def __init__(self, world_size: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.links: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, world_size, folder / "rendezvous", theirs), daemon=True)
            process.start()
            self.links.append(ours)
            self.processes.append(process)

    def run(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The result of each rank."""
        for link in self.links:
            link.send((job, arguments))
        results = []
        for rank, link in enumerate(self.links):
            result, error = link.recv()
            assert error is None, f"rank {rank}:\n{error}"
            results.append(result)
        return results

    def close(self) -> None:
        for link in self.links:
            link.close()
        for process in self.processes:
            process.join(10)
            process.kill()


def _work(rank: int, world_size: int, rendezvous: Path, link: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # nobody else can join
    torch.set_num_threads(1)
    ranks = Ranks.join(rank, world_size, f"file://{rendezvous}", torch.device("cpu"), timeout_s=60)
    while True:
        try:
            job, arguments = link.recv()
        except EOFError:
            break
        try:
            link.send((job(ranks, *arguments), None))
        except Exception:
            link.send((None, traceback.format_exc()))
    ranks.leave()
