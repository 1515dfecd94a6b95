"""One rank of the learner in a process of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from covey.cluster.transport import (
    Meeting,
    Notice,
    WeightGroup,
    bucket_size,
    trained_weights,
    write_notice,
)
from covey.learner.ranks import listen, open_store
from covey.protocols import Algorithm, Metrics, Needs, TokenTrace
from covey.rollout.vllm.weights import Named
from covey.types import Batch, Samples

BuildLearner = Callable[[int, int, Any], Any]  # rank, world, the store where ranks meet (None if alone) → its learner


class LearnerActor:
    """Calls are answered in the order in which they were made, the same on every rank."""

    def __init__(self) -> None:
        self.rank = 0
        self.learner: Any = None
        self._group: WeightGroup | None = None
        self._door: socket.socket | None = None  # where others will come in

    def alive(self) -> None:
        """Answered by whoever is."""

    def address(self) -> tuple[str, int]:
        """Where others find rank 0 from now on: it listens there. The other ranks have none."""
        from covey.cluster.rollout_actor import node_address

        if self.rank != 0:
            return "", 0
        if self._door is not None:
            self._door.close()
        self._door = listen(node_address())
        host, port = self._door.getsockname()[:2]
        return host, port

    def load(
        self, build: BuildLearner, rank: int, world: int, at: tuple[str, int], threads: int
    ) -> tuple[int, Any, Any]:
        """The process id, device and precision, once the models are there."""
        import torch

        torch.set_num_threads(threads)
        self.rank = rank
        if at[0].startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.learner = build(rank, world, open_store(*at, world, self._taken_door()) if world > 1 else None)
        return os.getpid(), self.learner.device, self.learner.dtype

    def call(self, method: str, *given: Any) -> Any:
        return getattr(self.learner, method)(*given)

    def annotate(self, samples: Samples, needs: Needs) -> Samples:
        found: Samples = self.learner.annotate(samples, needs)
        return found

    def update(self, batch: Batch, algorithm: Algorithm) -> tuple[Metrics, TokenTrace, dict[str, Any]]:
        """With what the algorithm remembers afterwards: this one is a copy."""
        metrics, trace = self.learner.update(batch, algorithm)
        return metrics, trace, algorithm.state_dict()

    # -- weights -----------------------------------------------------------------------------------------------

    def write(self, folder: Path, version: int) -> Notice | None:
        if self.rank == 0:
            with self._weights() as weights:
                return write_notice(weights, folder, version)
        with self._weights():
            pass
        return None

    def join(self, meeting: Meeting) -> None:
        from covey.cluster.rollout_actor import node_address

        self._group = None  # an earlier one ends first
        if self.rank == 0:
            self._group = WeightGroup(meeting, 0, node_address(), self._taken_door())

    def _taken_door(self) -> socket.socket | None:
        door, self._door = self._door, None
        return door

    def broadcast(self) -> None:
        if self.rank == 0:
            assert self._group is not None
            with self._weights() as weights:
                self._group.send(weights, bucket_size(self.learner.weights()))
        else:
            with self._weights():
                pass

    @contextmanager
    def _weights(self) -> Iterator[Named]:
        """To the last one on every rank, also on those that send nothing and where sending broke off: ranks gather
        sharded weights together, and must stay in step."""
        weights = trained_weights(self.learner.weights())
        try:
            yield weights
        finally:
            for _ in weights:
                pass
