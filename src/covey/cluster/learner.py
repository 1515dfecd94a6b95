"""One rank of the learner in a process of its own."""

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

from covey.cluster.actors import ActorLost, answer, answers, end, first_lost
from covey.errors import LearnerLost
from covey.protocols import Algorithm, Metrics, Needs, TokenTrace
from covey.types import Batch, Samples
from covey.weights.names import Named
from covey.weights.transport import (
    Meeting,
    Notice,
    WeightGroup,
    bucket_size,
    listen,
    open_store,
    trained_weights,
    write_notice,
)

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
        from covey.cluster.engines import node_address

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
        from covey.cluster.engines import node_address

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


# -- The learner, whose ranks are actors in Ray, behind the protocol of one. Every rank is called with the same argume--
# and gives the same answers; rank 0's count.

ASKING = 10.0  # seconds in which a rank that died is known to be


class RemoteLearner:
    def __init__(self, actors: Sequence[Any], build: BuildLearner, *, gpu: bool, threads: int) -> None:
        self.actors = list(actors)
        self.gpu = gpu
        self._order = threading.Lock()  # the same on every rank, also where two threads call
        world = len(self.actors)
        at = self._wait([self.actors[0].address.remote()])[0] if world > 1 else ("", 0)
        loading = [actor.load.remote(build, rank, world, at, threads) for rank, actor in enumerate(self.actors)]
        loaded = self._wait(loading)
        self.pids = [pid for pid, _, _ in loaded]
        self.device: torch.device = loaded[0][1]
        self.dtype: torch.dtype = loaded[0][2]

    # -- protocols.Learner -------------------------------------------------------------------------------------

    def annotate(self, samples: Samples, needs: Needs) -> Samples:
        found: Samples = self._ask("annotate", samples, needs)
        return found

    def update(self, batch: Batch, algorithm: Algorithm) -> tuple[Metrics, TokenTrace]:
        metrics, trace, state = self._ask("update", batch, algorithm)
        if state != algorithm.state_dict():
            algorithm.load_state_dict(state)
        return metrics, trace

    def weights(self) -> RemoteLearner:
        """Who sends them: they are not in this process."""
        return self

    def offload(self) -> None:
        self._ask("call", "offload")

    def reload(self) -> None:
        self._ask("call", "reload")

    # -- what a run's folder keeps -----------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Written by the ranks: every machine with a learner sees the run's folder."""
        self._ask("call", "save", folder.absolute())

    def counters(self) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("call", "counters")
        return found

    # -- publish.Sender ----------------------------------------------------------------------------------------

    async def write(self, folder: Path, version: int) -> Notice:
        found: Notice = await self._answer("write", folder, version)
        return found

    async def meet(self, members: int) -> Meeting:
        host, port = (await self._answer("address"))[:2]
        return Meeting(host, port, members, self.gpu)

    async def join(self, meeting: Meeting) -> None:
        await self._answer("join", meeting)

    async def broadcast(self) -> None:
        await self._answer("broadcast")

    # -- talking to the ranks ----------------------------------------------------------------------------------

    def close(self) -> None:
        """All ranks at once: what is left of a broken group would wait for the others."""
        for actor in self.actors:
            end(actor)

    def _send(self, method: str, *given: Any) -> list[Any]:
        import ray

        with self._order:
            once = [ray.put(value) for value in given] if len(self.actors) > 1 else given
            return [getattr(actor, method).remote(*once) for actor in self.actors]

    def _ask(self, method: str, *given: Any) -> Any:
        return self._wait(self._send(method, *given))[0]

    async def _answer(self, method: str, *given: Any) -> Any:
        """Who gives up leaves the call to its end: of one that is cancelled, some ranks would have begun."""
        references = self._send(method, *given)
        try:
            return (await asyncio.gather(*(answer(reference, cancels=False) for reference in references)))[0]
        except Exception as error:
            if (lost := await asyncio.to_thread(self._who_died, error)) is None:
                raise
            raise self._lost(lost) from error

    def _wait(self, references: list[Any]) -> list[Any]:
        try:
            return answers(references)
        except Exception as error:
            if (lost := self._who_died(error)) is None:
                raise
            raise self._lost(lost) from error

    def _who_died(self, error: Exception) -> ActorLost | None:
        """A rank's death often shows first as the error of another one, which it left in the midst of a collective."""
        if isinstance(error, ActorLost) or len(self.actors) == 1:
            return error if isinstance(error, ActorLost) else None
        return first_lost([actor.alive.remote() for actor in self.actors], ASKING)

    def _lost(self, error: ActorLost) -> LearnerLost:
        self.close()
        return LearnerLost(f"a learner died: {error}")


def with_restarts(
    make: Callable[[Path | None], Any], complete: Callable[[Any], None], *, limit: int, note: Callable[[str], None]
) -> Any:
    """A run that has come to its end. `make(folder)` builds it, in the folder of the attempt before if that got as far
    as having one; `complete` trains. An attempt that lost a learner, also while it was built, is followed by another,
    `limit` times at most."""
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
