"""The learner in other processes: `LearnerActor` is one rank, `RemoteLearner` calls all ranks behind
`protocols.Learner`.

Every rank is called with the same arguments, in the same order, and returns the same result; rank 0's is used. Runs
that lose a learner restart from their last checkpoint (`with_restarts`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from covey.cluster.actors import ActorLost, first_lost, kill, result, results
from covey.errors import LearnerLost
from covey.protocols import Algorithm, Metrics, Needs, TokenTrace
from covey.types import Batch, Samples
from covey.weights.buckets import bucket_size
from covey.weights.collective import Rendezvous, WeightGroup, listen, open_store
from covey.weights.files import WeightManifest, write_weights
from covey.weights.names import Named, trained_weights

BuildLearner = Callable[[int, int, Any], Any]  # rank, world size, the ranks' store (None for one rank) → learner


class LearnerActor:
    """One rank. Calls are executed in the order in which they were made, the same on every rank."""

    def __init__(self) -> None:
        self.rank = 0
        self.learner: Any = None
        self._group: WeightGroup | None = None
        self._listener: socket.socket | None = None  # for the next rendezvous

    def alive(self) -> None:
        """Return, if the process responds."""

    def address(self) -> tuple[str, int]:
        """Rank 0 listens on a new address for the others and returns it. Other ranks return an empty one."""
        from covey.cluster.engines import node_address

        if self.rank != 0:
            return "", 0
        if self._listener is not None:
            self._listener.close()
        self._listener = listen(node_address())
        host, port = self._listener.getsockname()[:2]
        return host, port

    def load(
        self, build: BuildLearner, rank: int, world: int, address: tuple[str, int], threads: int
    ) -> tuple[int, Any, Any]:
        """Load the models. Returns the process id, the device and the precision."""
        import torch

        torch.set_num_threads(threads)
        self.rank = rank
        if address[0].startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.learner = build(rank, world, open_store(*address, world, self._take_listener()) if world > 1 else None)
        return os.getpid(), self.learner.device, self.learner.dtype

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.learner, method)(*arguments)

    def annotate(self, samples: Samples, needs: Needs) -> Samples:
        annotated: Samples = self.learner.annotate(samples, needs)
        return annotated

    def update(self, batch: Batch, algorithm: Algorithm) -> tuple[Metrics, TokenTrace, dict[str, Any]]:
        """Run `Learner.update`. Also returns the algorithm's state after it, because the algorithm here is a copy of
        the driver's."""
        metrics, trace = self.learner.update(batch, algorithm)
        return metrics, trace, algorithm.state_dict()

    # -- weights -----------------------------------------------------------------------------------------------

    def write(self, folder: Path, version: int) -> WeightManifest | None:
        if self.rank == 0:
            with self._weights() as weights:
                return write_weights(weights, folder, version)
        with self._weights():
            pass
        return None

    def join(self, rendezvous: Rendezvous) -> None:
        from covey.cluster.engines import node_address

        self._group = None  # an earlier group ends first
        if self.rank == 0:
            self._group = WeightGroup(rendezvous, 0, node_address(), self._take_listener())

    def _take_listener(self) -> socket.socket | None:
        listener, self._listener = self._listener, None
        return listener

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
        """The weights to send. Gathering shards is a collective, so every rank iterates over all of them, even a rank
        that sends nothing, and even if sending fails halfway."""
        weights = trained_weights(self.learner.weights())
        try:
            yield weights
        finally:
            for _ in weights:
                pass


# -- All ranks -------------------------------------------------------------------------------------------------------

DEATH_NOTICED = 10.0  # seconds within which the death of a rank is noticed


class RemoteLearner:
    def __init__(self, actors: Sequence[Any], build: BuildLearner, *, gpu: bool, threads: int) -> None:
        self.actors = list(actors)
        self.gpu = gpu
        self._order = threading.Lock()  # calls of two threads must have the same order on every rank
        world = len(self.actors)
        address = self._wait([self.actors[0].address.remote()])[0] if world > 1 else ("", 0)
        loading = [actor.load.remote(build, rank, world, address, threads) for rank, actor in enumerate(self.actors)]
        loaded = self._wait(loading)
        self.pids = [pid for pid, _, _ in loaded]
        self.device: torch.device = loaded[0][1]
        self.dtype: torch.dtype = loaded[0][2]

    # -- protocols.Learner -------------------------------------------------------------------------------------

    def annotate(self, samples: Samples, needs: Needs) -> Samples:
        annotated: Samples = self._call("annotate", samples, needs)
        return annotated

    def update(self, batch: Batch, algorithm: Algorithm) -> tuple[Metrics, TokenTrace]:
        metrics, trace, state = self._call("update", batch, algorithm)
        if state != algorithm.state_dict():
            algorithm.load_state_dict(state)
        return metrics, trace

    def memory_note(self) -> str:
        note: str = self._call("call", "memory_note")
        return note

    def weights(self) -> RemoteLearner:
        """The sender of the weights (`WeightSource`): they are not in this process."""
        return self

    def offload(self) -> None:
        self._call("call", "offload")

    def reload(self) -> None:
        self._call("call", "reload")

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """The ranks write: every machine with a learner must see the run's folder."""
        self._call("call", "save", folder.absolute())

    def counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = self._call("call", "counters")
        return counters

    # -- covey.weights.transport.WeightSource ----------------------------------------------------------------------

    async def write(self, folder: Path, version: int) -> WeightManifest:
        manifest: WeightManifest = await self._call_async("write", folder, version)
        return manifest

    async def rendezvous(self, members: int) -> Rendezvous:
        host, port = (await self._call_async("address"))[:2]
        return Rendezvous(host, port, members, self.gpu)

    async def join(self, rendezvous: Rendezvous) -> None:
        await self._call_async("join", rendezvous)

    async def broadcast(self) -> None:
        await self._call_async("broadcast")

    # -- calls to the ranks ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill all ranks: the survivors of a broken group would wait for the others."""
        for actor in self.actors:
            kill(actor)

    def _send(self, method: str, *arguments: Any) -> list[Any]:
        import ray

        with self._order:
            stored = [ray.put(value) for value in arguments] if len(self.actors) > 1 else arguments
            return [getattr(actor, method).remote(*stored) for actor in self.actors]

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._wait(self._send(method, *arguments))[0]

    async def _call_async(self, method: str, *arguments: Any) -> Any:
        """Cancelling the wait does not cancel the call: some ranks might have begun it and others not."""
        references = self._send(method, *arguments)
        try:
            return (await asyncio.gather(*(result(reference, cancels=False) for reference in references)))[0]
        except Exception as error:
            if (lost := await asyncio.to_thread(self._dead_rank, error)) is None:
                raise
            raise self._lost(lost) from error

    def _wait(self, references: list[Any]) -> list[Any]:
        try:
            return results(references)
        except Exception as error:
            if (lost := self._dead_rank(error)) is None:
                raise
            raise self._lost(lost) from error

    def _dead_rank(self, error: Exception) -> ActorLost | None:
        """The death of a rank often shows first as the error of another rank, which waited for it in a collective."""
        if isinstance(error, ActorLost):
            return error
        if len(self.actors) == 1:
            return None
        return first_lost([actor.alive.remote() for actor in self.actors], DEATH_NOTICED)

    def _lost(self, error: ActorLost) -> LearnerLost:
        self.close()
        return LearnerLost(f"a learner died: {error}")


def with_restarts(
    make: Callable[[Path | None], Any], complete: Callable[[Any], None], *, limit: int, note: Callable[[str], None]
) -> Any:
    """Run to completion, restarting up to `limit` times after losing a learner, also while the run is built.
    `make(folder)` builds the run, in the folder of the previous attempt if that had one; `complete` trains."""
    folder: Path | None = None
    for restart in range(limit + 1):
        try:
            run = make(folder)
            folder = run.path
            run.restarts_left = limit - restart
            complete(run)
            return run
        except LearnerLost as error:
            if restart == limit:
                raise
            note(f"{error}\nrestart {restart + 1} of {limit} (cluster.max_restarts)")
    raise AssertionError("not reached")
