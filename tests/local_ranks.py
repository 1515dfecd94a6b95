"""W processes on this machine that learn together, for tests: started once, given one job after the other."""

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

    def __init__(self, world: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.links: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, world, folder / "meeting", theirs), daemon=True)
            process.start()
            self.links.append(ours)
            self.processes.append(process)

    def run(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank answered, by rank."""
        for link in self.links:
            link.send((job, arguments))
        answers = [link.recv() for link in self.links]
        for rank, (found, error) in enumerate(answers):
            assert error is None, f"rank {rank}:\n{error}"
            answers[rank] = found
        return answers

    def close(self) -> None:
        for link in self.links:
            link.close()
        for process in self.processes:
            process.join(10)
            process.kill()


def _work(rank: int, world: int, meeting: Path, link: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # nobody else can join
    torch.set_num_threads(1)
    ranks = Ranks.join(rank, world, f"file://{meeting}", torch.device("cpu"), timeout_s=60)
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
