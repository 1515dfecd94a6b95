"""One rank of the learner in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from covey.cluster.transport import (
    Meeting,
    Notice,
    WeightGroup,
    bucket_size,
    drain,
    free_port,
    trained_weights,
    write_notice,
)
from covey.protocols import Algorithm, Metrics, Needs, TokenTrace
from covey.types import Batch, Samples

BuildLearner = Callable[[int, int, str], Any]  # rank, world, where ranks meet ("" if alone) → its learner


class LearnerActor:
    """Calls are answered in the order in which they were made, the same on every rank."""

    def __init__(self) -> None:
        self.rank = 0
        self.learner: Any = None
        self._group: WeightGroup | None = None

    def address(self) -> tuple[str, int]:
        """A port of this machine where others can find this rank."""
        from covey.cluster.rollout_actor import node_address

        host = node_address()
        return host, free_port(host)

    def load(
        self, build: BuildLearner, rank: int, world: int, at: tuple[str, int], threads: int
    ) -> tuple[int, Any, Any]:
        """The process id, device and precision, once the models are there."""
        import torch

        torch.set_num_threads(threads)
        self.rank = rank
        if at[0].startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.learner = build(rank, world, f"tcp://{at[0]}:{at[1]}" if world > 1 else "")
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
            return write_notice(self._weights(), folder, version)
        drain(self._weights())
        return None

    def join(self, meeting: Meeting) -> None:
        from covey.cluster.rollout_actor import node_address

        self._group = None  # an earlier one ends first
        if self.rank == 0:
            self._group = WeightGroup(meeting, 0, node_address())

    def broadcast(self) -> None:
        if self.rank == 0:
            assert self._group is not None
            self._group.send(self._weights(), bucket_size(self.learner.weights()))
        else:
            drain(self._weights())

    def _weights(self) -> Any:
        return trained_weights(self.learner.weights())
